"""`regard doctor`."""

from dataclasses import asdict

from regard import api
from regard.api.formatting import with_prefix
from regard.cli.arguments import Json
from regard.cli.output import align_columns, print_json, print_section, spinner


def doctor(as_json: Json = False) -> None:
    """Show versions, hardware and missing optional packages.

    \b
    regard doctor
    regard doctor --json
    """
    with spinner("checking this machine"):
        diagnosis = api.doctor()
    if as_json:
        print_json(asdict(diagnosis))
        return
    gpus = ", ".join(diagnosis.gpus) or "none (none is needed)"
    machine = [
        ("cores", str(diagnosis.cores)),
        ("memory", f"{with_prefix(diagnosis.memory, 'B')} free"),
        ("disk", f"{with_prefix(diagnosis.disk, 'B')} free"),
        ("GPU", gpus),
        ("device", f"{diagnosis.device}; device=… chooses another"),
        ("cache", diagnosis.cache),
    ]
    print_section("versions", align_columns(list(diagnosis.versions.items())))
    print_section("this machine", align_columns(machine))
    packages = [(o, diagnosis.packages[o.package]) for o in api.OPTIONAL_PACKAGES]
    rows = [(o.package, version, o.purpose) for o, version in packages if version]
    if rows:
        print_section("optional packages", align_columns(rows))
    missing = [(o.package, o.purpose, o.install) for o, version in packages if not version]
    if missing:
        print_section("not installed, and needed only for", align_columns(missing))
    print_section("problems", diagnosis.problems or ["none"])
