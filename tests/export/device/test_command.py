"""The command of a device's folder."""

import json

import pytest
from click.testing import CliRunner

from jaxllm.cli.device import command
from jaxllm.export.device.service import ProgramService
from jaxllm.export.folder_format.manifest import Manifest
from tests.export.sizes import weights_file


@pytest.fixture
def run(engine, profile, folder, monkeypatch):
    """Runs a command on the engine that is open already."""

    def serve(choice, contexts, budget_bytes, context_bits):
        del choice, budget_bytes, context_bits
        assert contexts is None
        return ProgramService(engine, profile)

    monkeypatch.setattr(command._Choice, "open", lambda choice, level=100: engine.at(level))
    monkeypatch.setattr(command._Choice, "serve", serve)

    def invoked(*arguments, **more):
        return CliRunner().invoke(command.device, [str(folder), *arguments], **more)

    return invoked


def test_prompts_are_continued(run, engine):
    asked = ("-p", "the hello", "-p", "there", "--max-tokens", "4", "--ignore-eos")
    said = json.loads(run("generate", *asked, "--json").stdout)
    texts = [each["text"] for each in said["answers"]]
    assert [len(each["tokens"]) for each in said["answers"]] == [4, 4]
    assert run("generate", *asked).stdout == "".join(f"{text}\n" for text in texts)
    small = json.loads(run("generate", *asked, "--json", "--level", "40").stdout)
    assert [each["text"] for each in small["answers"]] != texts


def test_what_it_took_is_told(run, folder):
    facts = json.loads(run("facts", "--json").stdout)
    manifest = Manifest.read(folder)
    assert facts["weights_bytes"] == manifest.files[weights_file(manifest)].size_bytes
    assert facts["planned_bytes"] > facts["weights_bytes"]
    assert facts["peak_memory_bytes"] > 0
    assert "weights_bytes" in run("facts").stdout


def test_a_call_tells_its_plan(run):
    said = json.loads(run("call", "-p", "the", "--slo", "<90,90>", "--max-tokens", "3", "--json").stdout)
    assert said["level"] in (40, 100)
    assert said["met"] in (True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["call", "-p", "the", "--context", "new"], "--contexts and --context go together"),
        (["call", "--contexts", "c", "--context", "new", "--slo", "<9,9>", "-p", "a"], "keeps its level"),
        (["generate", "--level", "101"], "is no level"),
    ],
)
def test_wrong_usage(run, arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_folder_of_its_own_needs_no_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"], folder=tmp_path)
    said = capsys.readouterr().out
    assert said.startswith(f"Usage: python {tmp_path}")
    assert "FOLDER" not in said.partition("\n")[0]


@pytest.mark.parametrize("own", [False, True])
def test_errors_are_one_line(tmp_path, capsys, own):
    with pytest.raises(SystemExit) as ended:
        command.main([] if own else [str(tmp_path / "missing"), "facts"], folder=tmp_path if own else None)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert ("not a folder of programs" in said) == own
