"""What TensorBoard, wandb and trackio have kept of a run: (step, name, value), read from disk."""

import json


def tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [
        (event.step, name, event.value)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    ]


def wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in _records(path.read_bytes()):
            history = Record.FromString(content).history
            values = {
                item.key or ".".join(item.nested_key): item.value_json for item in history.item
            }
            found += [
                (history.step.num, name, json.loads(value))
                for name, value in values.items()
                if "/" in name
            ]
    return found


def _records(content):
    """The records of a file of wandb: LevelDB's log format after a header of 7 bytes."""
    at, record = 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:  # no room for a header: the block ends here
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def trackio(folder):
    import trackio

    name = json.loads((folder / "trackio.json").read_text())["id"]
    (own,) = (each for each in trackio.Api().runs("regard") if each.name.endswith(name))
    return [
        (row["step"], name, row[name])
        for row in trackio.sqlite_storage.SQLiteStorage.get_logs("regard", own.name)
        for name in row
        if "/" in name
    ]
