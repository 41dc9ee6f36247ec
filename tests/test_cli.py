"""The command line: fast to start, clear when wrong, exit code 2 and nothing left behind."""

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from retrofox import cli


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "base"
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Runs the command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["retrofox", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_no_torch():
    code = "import sys; sys.argv = ['retrofox', '--help']\nimport retrofox.cli\n"
    code += "try: retrofox.cli.main()\nexcept SystemExit: pass\n"
    code += "heavy = {'torch', 'transformers', 'numpy', 'triton', 'pydantic'} & set(sys.modules)\n"
    code += "sys.exit(f'imported {heavy}' if heavy else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "convert" in done.stdout


def test_dry_run_prints_the_plan_and_writes_nothing(monkeypatch, capsys, source, tmp_path):
    arguments = ["convert", source, tmp_path / "out", "--dry-run", "--json", "--half-life", 8, 64]
    code, out, _ = run(monkeypatch, capsys, *arguments)
    plan = json.loads(out)
    assert code == 0
    assert plan["half_lives_tokens"] == pytest.approx([8, 64], rel=1e-5)
    assert plan["parameters_added"] == 2 * 16 + 2
    assert not (tmp_path / "out").exists()


def test_convert_prints_json_alone_on_stdout(monkeypatch, capsys, source, tmp_path):
    code, out, _ = run(
        monkeypatch, capsys, "convert", source, tmp_path / "out", "--no-verify", "--json", "--rope", "drop"
    )
    report = json.loads(out)
    assert code == 0
    assert report["parity"] == "skipped (--no-verify)"
    assert report["plan"]["rotary_pairs_kept"] == [0]


BAD = {
    "--rope keeep": "rope must be one of keep, partial, drop, anneal; got 'keeep' (did you mean 'keep'?)",
    "--half-life 100 10": "0 < shortest <= longest",
    "--half-life 0 10": "0 < shortest <= longest",
    "--half-life 5": "--half-life",
    "--half-life a b": "--half-life",
    "--gate dta": "gate must be one of",
    "--init slope": "init must be one of",
    "--sink-tokens -1": "sink_tokens must be an integer >= 0",
    "--max-wavelength 0": "max_wavelength must be a positive number",
    "--pro qknorm": "pro must be one of",
    "--log-n 1": "log_n",
    "--rope drop --max-wavelength 100": "--max-wavelength belongs to --rope partial",
    "--init open --half-life 8 64": "--half-life says where gates start",
    "--bogus": "--bogus",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_options_exit_2_with_a_clear_text(monkeypatch, capsys, source, tmp_path, arguments):
    code, _, err = run(monkeypatch, capsys, "convert", source, tmp_path / "out", *arguments.split())
    assert code == 2
    assert BAD[arguments] in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["convert", "missing/model/dir", "{out}"], "no such directory"),
        (["convert", "{base}", "{base}"], "exists: remove it"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["config", "show", "missing.yaml"], "missing.yaml"),
        (["eval", "missing/model/dir", "--data", "{base}/config.json"], "missing/model/dir"),
        (["generate", "missing/model/dir", "hello"], "missing/model/dir"),
        (["inspect", "missing/model/dir"], "missing/model/dir"),
    ],
)
def test_missing_things_exit_2(monkeypatch, capsys, source, tmp_path, arguments, text):
    places = {"base": source, "out": tmp_path / "out"}
    code, _, err = run(monkeypatch, capsys, *(a.format(**places) for a in arguments))
    assert code == 2
    assert text in " ".join(err.split())
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_unknown_recipe_key_names_the_nearest(monkeypatch, capsys, tmp_path):
    (tmp_path / "r.yaml").write_text("modle: x\noutput: y\ndata: {train: [z]}\nstages: []\n")
    code, _, err = run(monkeypatch, capsys, "config", "show", tmp_path / "r.yaml")
    assert code == 2
    assert "modle" in err
    assert "model" in err


def test_config_schema_is_json_schema(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "config", "schema")
    assert code == 0
    assert "stages" in json.loads(out)["properties"]


def test_options_that_take_files_take_several():
    spread = cli.spread(["eval", "MODEL", "--data", "a", "b", "--length", "7", "--against", "x"])
    assert spread == ["eval", "MODEL", "--data", "a", "--data", "b", "--length", "7", "--against", "x"]
    untouched = ["eval", "--data", "a", "MODEL"]
    assert cli.spread(untouched) == untouched
    assert cli.spread(["convert", "S", "O", "--half-life", "1", "2"]) == ["convert", "S", "O", "--half-life", "1", "2"]
    assert cli.spread([]) == []
