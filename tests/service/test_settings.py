"""Settings from flags, the environment and a file: precedence, types, and errors that say what to do."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from service.settings import FIELDS, Parser, Settings, SettingsError, add_flags, load_settings, parse_size, to_toml


def flags(*arguments: str) -> dict[str, Any]:
    parser = Parser(prog="pagewalk serve")
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def load(*arguments: str, **environ: str) -> Settings:
    return load_settings(flags(*arguments), environ)[0]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_nothing_given_gives_the_defaults() -> None:
    settings, origins = load_settings(flags(), {"PATH": "/bin"})
    assert settings == Settings()
    assert settings.model == "smollm2"
    assert set(origins.values()) == {"default"}


def test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "port = 1\nhost = '1.1.1.1'\nmax_num_seqs = 3\n")
    environ = {"PAGEWALK_PORT": "2", "PAGEWALK_HOST": "2.2.2.2"}
    settings, origins = load_settings(flags("--config", file, "--port", "3"), environ)
    assert (settings.port, settings.host, settings.max_num_seqs) == (3, "2.2.2.2", 3)
    assert [origins[name] for name in ("port", "host", "max_num_seqs", "dtype")] == ["flag", "env", file, "default"]


def test_the_file_may_come_from_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "api_key: [a, b]\nsse_keep_alive: 3\nkv_cache_memory_bytes: 1 GiB\n")
    settings = load(PAGEWALK_CONFIG=file)
    assert (settings.api_keys, settings.sse_keep_alive_s) == (["a", "b"], 3.0)
    assert settings.kv_cache_memory_bytes == 2**30


def test_the_model_is_the_first_word_too() -> None:
    assert load("some/model").model == load("--model", "some/model").model == "some/model"


def test_lists() -> None:
    assert load("--served-model-name", "a", "b").served_model_names == ["a", "b"]
    assert load(PAGEWALK_SERVED_MODEL_NAME="a, b").served_model_names == ["a", "b"]


def test_auto_is_none_from_every_source(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "threads = 'auto'")
    assert load("--max-num-seqs", "auto").max_num_seqs is None
    assert load(PAGEWALK_MAX_NUM_SEQS="auto").max_num_seqs is None
    assert load("--config", file).threads is None


def test_an_empty_variable_is_not_set() -> None:
    assert load(PAGEWALK_PORT="").port == 8000


def test_another_name_for_a_flag() -> None:
    assert load("--block-size", "8").page_size == 8


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("512 MiB", 2**29), ("1.5GB", 1_500_000_000), ("2k", 2000), ("1000", 1000), ("1tib", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert load("--kv-cache-memory-bytes", text).kv_cache_memory_bytes == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "4QiB", "1e9", "nan", "4 GiB GiB", "0"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match="--kv-cache-memory-bytes: must be"):
        load(f"--kv-cache-memory-bytes={text}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], "--port: must be a whole number, got x"),
        (["--port", "1.5"], "--port: must be a whole number, got 1.5"),
        (["--port", "70000"], "--port: must be a whole number <= 65535, got 70000"),
        (["--port", "99999999999999999999"], "--port: must be"),
        (["--max-num-seqs", "0"], "--max-num-seqs: must be a whole number >= 1, got 0"),
        (["--dtype", "int8"], "--dtype: must be one of auto, float32, bfloat16, float16, got int8"),
        (["--sse-keep-alive", "nan"], "--sse-keep-alive: must be a number, got nan"),
        (["--sse-keep-alive", "0"], "--sse-keep-alive: must be"),
        (["--gpu-memory-utilization", "1.1"], "--gpu-memory-utilization: must be"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens: must be 64 or more"),
        (["--page-size", "8", "--device", "cuda"], "--page-size"),
        (["--host", ""], "--host: must be"),
        (["--config", "nowhere.toml"], "nowhere.toml: cannot be read"),
        (["--config", __file__], "must end in .toml, .yaml or .yml"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["sse_keep_alive = nan", "port = true", "port = '8000'", "api_key = [1]", "model = 3"])
def test_a_file_takes_typed_values_only(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=f"c.toml: {text.split()[0]}: must be"):
        load("--config", write(tmp_path / "c.toml", text))


@pytest.mark.parametrize(
    ("name", "text"), [("c.toml", "port = = 1"), ("c.yaml", "a: [1"), ("c.yml", "- 1"), ("c.toml", "\xff")]
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=name):
        load("--config", str(path))


def test_unknown_names_are_errors_with_the_nearest_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match=r"^PAGEWALK_PROT is no setting, did you mean PAGEWALK_PORT\?$"):
        load(PAGEWALK_PROT="1")
    with pytest.raises(SettingsError, match=r"prot is no setting, did you mean port\?$"):
        load("--config", write(tmp_path / "c.toml", "prot = 1"))
    with pytest.raises(SystemExit) as exit:
        flags("--prot", "1")
    assert exit.value.code == 2
    assert capsys.readouterr().err == "pagewalk: error: --prot is no flag, did you mean --port?\n"


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        flags("--por", "1")


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "first\nsecond\n")
    assert load(PAGEWALK_API_KEY_FILE=file).api_keys == ["first", "second"]
    with pytest.raises(SettingsError, match="holds 2 keys"):
        load(PAGEWALK_ADMIN_API_KEY_FILE=file)
    with pytest.raises(SettingsError, match="both set"):
        load(PAGEWALK_API_KEY_FILE=file, PAGEWALK_API_KEY="x")
    with pytest.raises(SettingsError, match="holds 0 keys"):
        load(PAGEWALK_API_KEY_FILE=write(tmp_path / "none", "\n"))
    with pytest.raises(SettingsError, match="cannot be read"):
        load(PAGEWALK_API_KEY_FILE=str(tmp_path / "nowhere"))


def test_a_wrong_key_is_not_printed() -> None:
    with pytest.raises(SettingsError) as caught:
        load("--api-key", "secret with spaces")
    assert "secret" not in str(caught.value)


def test_shown_settings_can_be_read_again(tmp_path: Path) -> None:
    arguments = ["--port", "9", "--served-model-name", 'a "b"', "c", "--threads", "2", "--sse-keep-alive", "0.5"]
    settings, origins = load_settings(flags(*arguments), {})
    shown = to_toml(settings, origins)
    assert "port = 9  # flag" in shown
    assert load("--config", write(tmp_path / "c.toml", shown)) == settings
    not_set = {"revision", "tokenizer", "chat_template", "demo_wheel", "admin_api_key"}
    assert set(tomllib.loads(shown)) | not_set == set(FIELDS)


def test_shown_settings_hide_secrets() -> None:
    shown = to_toml(*load_settings(flags("--api-key", "hush", "--admin-api-key", "hushhush"), {}))
    assert "hush" not in shown
    assert "api_key is set (flag)" in shown


def test_help_speaks_of_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        flags("--help")
    assert exit.value.code == 0
    help_text = capsys.readouterr().out
    for field in FIELDS.values():
        assert field.flag in help_text
        assert len(field.about.text) > 10
    assert "(default: 8000)" in help_text
