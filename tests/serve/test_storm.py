"""The long forms of the server's tests: a thousand clients, disconnects, slow senders, fuzzing.

`pytest -m long -s tests/serve/test_storm.py` prints the figures of docs/results.md. Fuzzing needs
schemathesis, in the environment of REGARD_CLIENTS (test_clients.py).
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

import regard

pytest.importorskip("fastapi")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
CLIENTS = os.environ.get("REGARD_CLIENTS")
SAMPLERS = (["greedy"], ["temperature=0.8", "top_p=0.95"], ["top_k=8", "min_p=0.05"])


class Process:
    """`regard serve` in a process of its own."""

    def __init__(self, run, *words):
        command = [sys.executable, "-m", "regard", "serve", str(run), "--port", "0", *words]
        # not a pipe: one that nobody reads fills up, and the server waits
        self.log = tempfile.NamedTemporaryFile("r+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self.log, text=True)
        while not (line := Path(self.log.name).read_text()).endswith("\n"):
            assert self.process.poll() is None, line
            time.sleep(0.05)
        assert "serving at" in line, line
        self.address = line.split("\n")[0].split()[-1]
        self.host, port = self.address.removeprefix("http://").split(":")
        self.port = int(port)

    @property
    def memory(self):
        """Resident MiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024

    @property
    def cpu(self):
        """Seconds of processor time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()

    async def ask(self, path, body=None, leave_after=None):
        """Status, headers and content; `leave_after` closes the connection after some lines."""
        content = b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        method = b"GET" if body is None else b"POST"
        writer.write(
            b"%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n"
            % (method, path.encode(), len(content))
        )
        writer.write(content)
        lines = []
        try:
            while leave_after is None or len(lines) < leave_after:
                line = await reader.readline()
                if not line:
                    break
                lines.append(line)
        finally:
            writer.close()
        if leave_after is not None:
            return None
        end = lines.index(b"\r\n")
        headers = dict(line.decode().lower().strip().split(": ", 1) for line in lines[1:end])
        return int(lines[0].split()[1]), headers, lines[end + 1 :]

    def health(self):
        return asyncio.run(self.ask("/health"))[0]

    def counter(self, name):
        _, _, lines = asyncio.run(self.ask("/metrics"))
        text = b"".join(lines).decode()
        found = re.search(rf"^regard_{name}(?:\{{.*\}})? (\d+)$", text, re.M)
        return int(found[1])


def bodies(count):
    draw = random.Random(0)
    for number in range(count):
        yield {
            "prompt": "the cat sat on the mat"[: draw.randint(1, 22)],
            "max_tokens": draw.choice([1, 5, 20, 60, 100]),
            "seed": number % 40,
            "sampler": SAMPLERS[number % 3],
            "stream": number % 4 > 0,
        }


def text_of(lines, streamed):
    content = b"".join(lines)
    if not streamed:
        return json.loads(content[content.index(b"{") : content.rindex(b"}") + 1])["choices"][0][
            "text"
        ]
    events = re.findall(rb"^data: (.*?)\r?$", content, re.M)
    assert events[-1] == b"[DONE]", events[-1]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_a_thousand_clients(text_run):
    """Each gets its whole answer, the one it gets alone, or 429; nothing hangs or leaks."""
    run = regard.load(text_run)
    with Process(text_run, "--max-queue", "64") as server:

        async def storm(count):
            async def one(body):
                began = time.perf_counter()
                status, headers, lines = await server.ask("/v1/completions", body)
                return status, headers, lines, time.perf_counter() - began

            requests = list(bodies(count))
            tasks = [one(body) for body in requests]
            return requests, await asyncio.wait_for(asyncio.gather(*tasks), 600)

        asyncio.run(storm(1000))  # buffers grow to their size
        time.sleep(1)
        memory, files = server.memory, server.files
        began = time.perf_counter()
        requests, answers = asyncio.run(storm(1000))
        seconds = time.perf_counter() - began
        answered = [pair for pair in zip(requests, answers, strict=True) if pair[1][0] == 200]
        refused = [answer for answer in answers if answer[0] != 200]
        for status, headers, _, _ in refused:
            assert status in (429, 503)
            assert "retry-after" in headers
        alone = {}
        for body, (_, _, lines, _) in answered:
            key = (body["prompt"], body["max_tokens"], body["seed"], *body["sampler"])
            if key not in alone:
                alone[key] = run.generate(
                    body["prompt"],
                    max_new_tokens=key[1],
                    seed=body["seed"],
                    sampler=body["sampler"],
                )
            assert text_of(lines, body["stream"]) == alone[key], body
        time.sleep(2)
        print(
            f"\n1,000 clients in {seconds:.1f} s: {len(answered)} answered as alone, "
            f"{len(refused)} refused with 429, 0 hang; memory {memory:.0f} → {server.memory:.0f} "
            f"MiB, files {files} → {server.files}"
        )
        assert len(answered) >= 64
        assert server.files <= files
        assert server.memory < 1.05 * memory
        assert server.health() == 200


def test_five_hundred_disconnects(text_run):
    """In the queue, while the prompt is read, while the text is written."""
    with Process(text_run, "--max-sequences", "8", "--max-queue", "64") as server:
        draw = random.Random(1)

        async def storm(count):
            async def one(number):
                body = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True}
                body["stream"] = number % 3 > 0
                await asyncio.sleep(draw.random() * count / 50)
                lines = draw.choice([0, 5, 20, 60]) if body["stream"] else 0
                await server.ask("/v1/completions", body, leave_after=lines)

            await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(count))), 300)

        asyncio.run(storm(100))
        time.sleep(1)
        memory, files = server.memory, server.files
        asyncio.run(storm(500))
        began = time.perf_counter()
        while server.counter("open_requests") or server.counter("running"):
            assert time.perf_counter() - began < 5
        freed = time.perf_counter() - began
        tokens = server.counter("generation_tokens_total")
        time.sleep(1)
        assert server.counter("generation_tokens_total") == tokens
        print(
            f"\n500 disconnects: all rows free after {freed:.2f} s; memory {memory:.0f} → "
            f"{server.memory:.0f} MiB, files {files} → {server.files}"
        )
        assert server.files <= files
        assert server.memory < 1.05 * memory
        assert server.health() == 200


GOOD_CLIENT = """
import http.client, json, sys, time
seconds = []
for _ in range(int(sys.argv[3])):
    began = time.perf_counter()
    connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]))
    body = json.dumps({"prompt": "the", "max_tokens": 5, "seed": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    seconds.append(time.perf_counter() - began)
seconds.sort()
print(seconds[len(seconds) // 2], seconds[int(0.99 * (len(seconds) - 1))])
"""


def test_a_thousand_slow_senders(text_run):
    """Sockets that send a byte now and then, in their headers or in their body.

    The good client is a process of its own, so that it does not wait for the slow ones.
    """
    with Process(text_run) as server:

        async def measure(count):
            words = [server.host, str(server.port), str(count)]
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", GOOD_CLIENT, *words, stdout=subprocess.PIPE
            )
            out, _ = await client.communicate()
            assert client.returncode == 0
            return [float(seconds) * 1e3 for seconds in out.split()]

        async def slow(number):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
            body = b"Content-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
            writer.write(head + (body if number % 2 else b""))
            began = time.perf_counter()
            try:
                while not reader.at_eof():
                    writer.write(b"x")
                    try:
                        await asyncio.wait_for(reader.read(100), 3)
                    except TimeoutError:
                        continue
            except OSError:
                pass
            writer.close()
            return time.perf_counter() - began

        async def storm():
            before = await measure(200)
            senders = [asyncio.create_task(slow(number)) for number in range(1000)]
            await asyncio.sleep(2)
            cpu = server.cpu
            began = time.perf_counter()
            during = await measure(200)
            share = (server.cpu - cpu) / (time.perf_counter() - began)
            last = max(await asyncio.gather(*senders))
            return before, during, await measure(200), share, last

        before, during, after, share, last = asyncio.run(asyncio.wait_for(storm(), 200))
        shown = ", ".join(
            f"{name} {p50:.0f} and {p99:.0f} ms"
            for name, (p50, p99) in (("before", before), ("beside them", during), ("after", after))
        )
        print(
            f"\n1,000 slow senders: the last was dropped after {last:.1f} s; p50 and p99 of a good "
            f"client {shown}; the server used {share:.0%} of a core beside them"
        )
        assert last < 20
        assert during[1] < max(2 * max(before[1], after[1]), 300)


def test_sigterm_finishes_what_runs(text_run):
    """Streams are completed, the exit code is 0, and the port is free, after SIGKILL too."""
    with Process(text_run) as server:

        async def drain():
            body = {"prompt": "the", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            running = [asyncio.create_task(server.ask("/v1/completions", body)) for _ in range(8)]
            await asyncio.sleep(0.7)
            assert not any(task.done() for task in running)
            server.process.send_signal(signal.SIGTERM)
            began = time.perf_counter()
            answers = await asyncio.gather(*running)
            for status, _, lines in answers:
                assert status == 200
                assert b"".join(lines).rstrip().endswith(b"0") or b"[DONE]" in b"".join(lines[-6:])
            return time.perf_counter() - began

        seconds = asyncio.run(drain())
        code = server.process.wait(30)
        print(
            f"\nSIGTERM under load: 8 of 8 streams completed in {seconds:.1f} s, exit code {code}"
        )
        assert code == 0
    for _ in range(2):  # the end of the block kills it by SIGKILL
        with Process(text_run, "--port", str(server.port)) as again:
            assert again.port == server.port
            assert again.health() == 200


def test_sixty_readers_that_never_read(text_run):
    """Every row is free within 30 s; a good client is answered meanwhile."""
    body = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True, "logprobs": 20}
    content = json.dumps({**body, "stream": True}).encode()
    with Process(text_run) as server:
        before, files = server.memory, server.files
        sockets = []
        for _ in range(60):
            unread = socket.socket()
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect((server.host, server.port))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            unread.sendall(head % len(content) + content)
            sockets.append(unread)
        began, slowest, most = time.perf_counter(), 0.0, 0
        while not server.counter("open_requests"):
            assert time.perf_counter() - began < 10
        while server.counter("open_requests"):
            asked = time.perf_counter()
            status, _, _ = asyncio.run(server.ask("/v1/completions", {"prompt": "the"}))
            slowest, most = max(slowest, time.perf_counter() - asked), max(most, server.memory)
            assert status == 200
            assert time.perf_counter() - began < 45  # the time of generation included
        seconds = time.perf_counter() - began
        print(
            f"\n60 readers that never read: all dropped after {seconds:.1f} s, the slowest answer "
            f"to a good client {slowest:.2f} s; memory {before:.0f}, at most {most:.0f} MiB"
        )
        assert server.files <= files
        for unread in sockets:
            unread.close()


@pytest.mark.skipif(CLIENTS is None, reason="REGARD_CLIENTS is not set")
@pytest.mark.parametrize("key", [None, "sesame"])
def test_fuzzed_requests_cause_no_server_error(text_run, pair_run, tmp_path, key):
    words = [] if key is None else ["--api-key", key]
    with Process(text_run, str(pair_run), *words) as server:
        fuzz(server, tmp_path, key, "--phases", "coverage", "--max-time", "60")
        before = server.memory
        limit = os.environ.get("REGARD_FUZZ", "600")
        words = ["--phases", "examples,coverage,fuzzing", "--max-time", limit]
        done = fuzz(server, tmp_path, key, *words)
        assert server.health() == 200
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{server.address}/metrics", headers=headers)
        text = urllib.request.urlopen(request).read().decode()
        counts = dict(
            re.findall(r'^regard_http_responses_total\{status="(\d+)"\} (\d+)$', text, re.M)
        )
        total = sum(map(int, counts.values()))
        log = Path(server.log.name).read_text()
        print(
            f"\n{total:,} fuzzed requests: {counts}; memory {before:.0f} → {server.memory:.0f} "
            f"MiB; {len(log.splitlines())} lines in the log"
        )
        assert "Traceback" not in log, log[-5000:]
        assert not [status for status in counts if status.startswith("5")], done.stdout[-5000:]
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert server.memory < 1.05 * before


def fuzz(server, folder, key, *words):
    """Run schemathesis against a server."""
    command = [
        str(Path(CLIENTS).with_name("schemathesis")),
        *("run", f"{server.address}/openapi.json", *words),
        *("--checks", "not_a_server_error,response_schema_conformance", "--max-examples", "2000"),
        *("--seed", "1", "--continue-on-failure"),
        *([] if key is None else ["--header", f"Authorization: Bearer {key}"]),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)
