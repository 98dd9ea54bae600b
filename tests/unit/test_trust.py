"""Nothing received is executed or unpickled, in no package; and who is another user gets no answer."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import Children
from support.rarely import rarely
from support.servers import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for part in ("replay_server", "client", "protocol") for path in (ROOT / part).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib", "code", "codeop", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "np.load", "numpy.load", "os.system", "os.popen", "yaml.load"}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized"}


def offences(tree: ast.AST) -> Iterator[str]:
    """What could make code of data, as ``line: name``."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"{node.lineno}: import {alias.name}" for alias in names if alias.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield f"{node.lineno}: from {module} import"
            case ast.Call(func=func) if ast.unparse(func) in CALLS:
                yield f"{node.lineno}: {ast.unparse(func)}()"
            case ast.Attribute(attr=attribute) if attribute in METHODS:
                yield f"{node.lineno}: {attribute}"
            case ast.keyword(arg="allow_pickle" | "shell"):
                yield f"{node.value.lineno}: {node.arg}="


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_makes_code_of_data(path: Path) -> None:
    assert list(offences(ast.parse(path.read_text("utf-8")))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "torch.load(x)",
        "np.load(x, allow_pickle=True)",
        "s.recv_pyobj()",
        "import yaml.x",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(offences(ast.parse(source)))


def ask_as_nobody(control: str, status: str) -> list[str]:
    """Says HELLO and asks for the status with another uid, once barred by the directory and once let into it. Returns the answers."""
    import os

    import zmq
    from replay_server_protocol.codec import client_codec
    from replay_server_protocol.messages import Hello

    os.setgid(65534)
    os.setuid(65534)
    answers = []
    hello = client_codec.encode(Hello(1, 7, "learner", "", 0, 0, 0, None, None, 0, True, 0, None))
    with zmq.Context() as context:
        for address, request in ((control, hello), (status, b"status")):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(address)
                try:
                    socket.send(request, zmq.NOBLOCK)
                    answers.append(repr(socket.recv()[:80]) if socket.poll(1500) else "")
                except zmq.Again:
                    answers.append("")
    return answers


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("is_open", [True, *rarely(False)])
def test_another_user_gets_no_answer(start_server: Callable[..., ServerProcess], children: Children, is_open: bool) -> None:
    """Not behind the 0700 directory, and not where that and the sockets' modes are opened to all: the kernel says who connects."""
    server = start_server()
    paths = (server.endpoints.control_path, server.endpoints.status_path)
    if is_open:
        server.run_dir.chmod(0o777)
        for path in paths:
            path.chmod(0o777)
    nobody = children.run(ask_as_nobody, server.endpoints.control, server.endpoints.status)
    assert nobody.result() == ["", ""]
    server.run_dir.chmod(0o700)
