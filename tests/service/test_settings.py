"""Settings from flags, the environment and a file: precedence, types, and errors that say what to do."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm import TenantLimits
from service.errors import ConfigurationError
from service.rate_limits import RateLimit
from service.setting_values import parse_size
from service.settings import FIELDS, Settings, SettingsError, watermark_shares
from service.settings_sources import Parser, add_flags, load_settings, to_toml
from service.tenant_settings import read_tenants, tenant_limits


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
        (["--max-itl-ms", "0"], "--max-itl-ms: must be a number > 0.0, got 0"),
        (["--max-itl-ms", "fast"], "--max-itl-ms: must be a number, got fast"),
        (["--max-num-seqs", "0"], "--max-num-seqs: must be a whole number >= 1, got 0"),
        (["--dtype", "int8"], "--dtype: must be one of auto, float32, bfloat16, float16, got int8"),
        (["--sse-keep-alive", "nan"], "--sse-keep-alive: must be a number, got nan"),
        (["--sse-keep-alive", "0"], "--sse-keep-alive: must be"),
        (["--gpu-memory-utilization", "1.1"], "--gpu-memory-utilization: must be"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "--max-num-batched-tokens: must be 64 or more"),
        (["--page-size", "8", "--device", "cuda"], "--page-size"),
        (["--host", ""], "--host: must be"),
        (["--host", "\udcff"], "--host: must be text in UTF-8"),
        (["--model", "a\0"], "--model: must be text in UTF-8"),
        (["--served-model-name", "good", "a\udcff"], "--served-model-name: must be text in UTF-8"),
        (["--threads", "1025"], "--threads: must be a whole number <= 1024, got 1025"),
        (["--max-model-len", "1"], "--max-model-len: must be a whole number >= 2, got 1"),
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read"),
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


def test_a_switch_is_on_or_off_from_every_source(tmp_path: Path) -> None:
    assert load().enable_prefix_caching
    assert load("--enable-prefix-caching", PAGEWALK_ENABLE_PREFIX_CACHING="false").enable_prefix_caching
    assert not load("--no-enable-prefix-caching").enable_prefix_caching
    assert not load(PAGEWALK_ENABLE_PREFIX_CACHING="0").enable_prefix_caching
    file = write(tmp_path / "c.yaml", "enable_prefix_caching: false")
    assert not load("--config", file).enable_prefix_caching
    with pytest.raises(SettingsError, match=r"^PAGEWALK_ENABLE_PREFIX_CACHING: must be true or false, got maybe$"):
        load(PAGEWALK_ENABLE_PREFIX_CACHING="maybe")


def test_watermarks_are_shares_of_the_pool() -> None:
    assert watermark_shares(load()) == (0.01, 0.02, 0.04)
    assert watermark_shares(load("--watermarks", "0%, 2.5%,50%")) == (0.0, 0.025, 0.5)


@pytest.mark.parametrize(
    "text", ["1%", "1%,2%", "1,2,4", "1%,2%,4%,8%", "4%,2%,1%", "1%,2%,100%", "1%,2%,-4%", "a,b,c"]
)
def test_watermarks_that_are_none(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^--watermarks: must"):
        load("--watermarks", text)


# --- tenants


TENANTS = """
port = 9
[tenants.chat]
memory_min = "25%"
memory_low = "30%"
isolate = true
[tenants."batch jobs"]
memory_high = "1.5 GiB"
memory_max = 4294967296
swap_max = "0"
weight = 50
requests_per_minute = 60
tokens_per_minute = 100000
max_concurrent_requests = 8
"""


def test_tenants_come_from_the_file_as_tables(tmp_path: Path) -> None:
    settings = load("--config", write(tmp_path / "c.toml", TENANTS))
    limits = tenant_limits(settings.tenants, frames=1000, slots=100, frame_bytes=2**23)
    assert limits == {
        "chat": TenantLimits(min=250, low=300, isolate=True),
        "batch jobs": TenantLimits(high=192, max=512, swap_max=0, weight=50),
    }
    yaml = "tenants: {chat: {memory_max: 50%, swap_max: 10%}}"
    settings = load("--config", write(tmp_path / "c.yaml", yaml))
    limits = tenant_limits(settings.tenants, frames=9, slots=100, frame_bytes=1)
    assert limits == {"chat": TenantLimits(high=4, max=4, swap_max=10)}


def test_how_much_a_tenant_may_ask_stands_beside_its_memory(tmp_path: Path) -> None:
    tenants = load("--config", write(tmp_path / "c.toml", TENANTS)).tenants
    expected = RateLimit(requests_per_minute=60, tokens_per_minute=100_000, max_concurrent_requests=8)
    assert tenants["batch jobs"].rate_limit == expected
    assert not tenants["chat"].rate_limit.is_limited


def test_a_min_alone_is_a_low_too_and_a_max_alone_a_high() -> None:
    tenants = read_tenants({"a": {"memory_min": 5}, "b": {"memory_max": 7}})
    limits = tenant_limits(tenants, frames=20, slots=0, frame_bytes=1)
    assert limits == {"a": TenantLimits(min=5, low=5), "b": TenantLimits(high=7, max=7)}


def test_shown_tenants_can_be_read_again(tmp_path: Path) -> None:
    settings, origins = load_settings(flags("--config", write(tmp_path / "c.toml", TENANTS)), {})
    shown = to_toml(settings, origins)
    assert '[tenants."batch jobs"]' in shown
    assert load("--config", write(tmp_path / "d.toml", shown)) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants = 3", "tenants: must be tables, one for each name"),
        ("[tenants]\na = 3", "tenants.a: must be a table"),
        ("[tenants.a]\nmemory_mx = 3", "tenants.a: memory_mx is no setting of a tenant, did you mean memory_max?"),
        ("[tenants.a]\nmemory_max = 'x'", "tenants.a.memory_max: must be a size such as 4GiB or 512MiB, got x"),
        ("[tenants.a]\nmemory_max = -1", "tenants.a.memory_max: must be a size such as 4GiB, or a share such as 25%"),
        ("[tenants.a]\nmemory_max = true", "tenants.a.memory_max: must be"),
        ("[tenants.a]\nmemory_max = '101%'", "tenants.a.memory_max: must be a share from 0% to 100%, got 101%"),
        ("[tenants.a]\nweight = 0", "tenants.a.weight: must be a whole number from 1 to 10000, got 0"),
        ("[tenants.a]\nrequests_per_minute = 0", "tenants.a.requests_per_minute: must be a whole number from 1"),
        ("[tenants.a]\ntokens_per_minute = '5%'", "tenants.a.tokens_per_minute: must be a whole number from 1"),
        ("[tenants.a]\nmax_concurrent_requests = true", "tenants.a.max_concurrent_requests: must be a whole number"),
        ("[tenants.a]\nisolate = 1", "tenants.a.isolate: must be true or false, got 1"),
        ("[tenants.a]\nmemory_min = '2GiB'\nmemory_max = '1GiB'", "memory_min (2GiB) is above memory_max (1GiB)"),
        ("[tenants.a]\nmemory_low = '60%'\nmemory_high = '50%'", "memory_low (60%) is above memory_high (50%)"),
        ("[tenants.a]\nmemory_min = '60%'\n[tenants.b]\nmemory_min = '50%'", "memory_min of all together is 110%"),
        ("[tenants.'']\nweight = 3", "a name must be 1 to 128 printable characters, got ''"),
        ('[tenants."a\\u0007"]\nweight = 3', "a name must be 1 to 128 printable characters, got 'a\\x07'"),
        (f"[tenants.{'a' * 129}]\nweight = 3", "a name must be 1 to 128 printable characters"),
        ("tenant = 3", "tenant is no setting, did you mean tenants?"),
    ],
)
def test_a_wrong_tenant_is_one_line_that_names_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load("--config", write(tmp_path / "c.toml", text))
    assert "c.toml: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_tenants_than_are_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="255 are listed, and at most 254 can be"):
        read_tenants({str(i): {} for i in range(255)})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"a": {"memory_min": "60%", "memory_max": 40}},
            "memory_min 60, memory_low 60, memory_high 40 and memory_max 40",
        ),
        ({"a": {"memory_min": 60}, "b": {"memory_min": "40%"}}, "memory_min of all together is 100 frames"),
        ({"a": {"memory_max": "0.1%"}}, "tenants.a: memory_max .0.1%. is less than one frame"),
    ],
)
def test_what_only_the_pool_can_tell_is_a_configuration_error(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        tenant_limits(read_tenants(table), frames=100, slots=0, frame_bytes=1)


def test_help_says_where_tenants_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags("--help")
    assert "[tenants.NAME]" in capsys.readouterr().out


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
    settings = load("--api-key", "third", PAGEWALK_API_KEY_FILE=file)
    assert (settings.api_key_file, settings.api_keys) == (file, ["third"])
    assert load("--api-key-file", file).api_key_file == file
    with pytest.raises(SettingsError, match="holds 0 keys"):
        load(PAGEWALK_API_KEY_FILE=write(tmp_path / "none", "\n"))
    with pytest.raises(SettingsError, match=r"--api-key-file: .* cannot be read"):
        load(PAGEWALK_API_KEY_FILE=str(tmp_path / "nowhere"))


def test_the_admin_key_from_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "key", "root\n")
    assert load(PAGEWALK_ADMIN_API_KEY_FILE=file).admin_api_key == "root"
    with pytest.raises(SettingsError, match="both set"):
        load(PAGEWALK_ADMIN_API_KEY_FILE=file, PAGEWALK_ADMIN_API_KEY="x")
    with pytest.raises(SettingsError, match="holds 2 keys"):
        load(PAGEWALK_ADMIN_API_KEY_FILE=write(tmp_path / "two", "a\nb\n"))


def pipe(path: Path) -> None:
    os.mkfifo(path)  # that nobody writes to


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": pipe,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a large file": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_plain_file_is_refused_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "c.toml"
    NO_FILES[kind](place)
    why = "it has 1099511627776 bytes, more than 16777216" if kind == "a large file" else "it is no plain file"
    with pytest.raises(SettingsError, match=f"^--config {place} cannot be read: {why}$"):
        load("--config", str(place))
    with pytest.raises(SettingsError, match=f"^--api-key-file: {place} cannot be read: {why}$"):
        load("--api-key-file", str(place))
    with pytest.raises(SettingsError, match=f"^PAGEWALK_ADMIN_API_KEY_FILE: {place} cannot be read: {why}$"):
        load(PAGEWALK_ADMIN_API_KEY_FILE=str(place))


def test_tls_needs_both_files() -> None:
    with pytest.raises(SettingsError, match="TLS needs both"):
        load("--tls-cert", "cert.pem")


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", "null"])
def test_origins_that_are_none(origin: str) -> None:
    """A slash at the end would never match what browsers send, and so close the door in silence."""
    with pytest.raises(SettingsError, match="cors-allow-origins"):
        load("--cors-allow-origins", origin)
    good = ["*", "https://chat.example.org", "http://localhost:3000"]
    assert load("--cors-allow-origins", *good).cors_allow_origins == good


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
    not_set = {"revision", "tokenizer", "chat_template", "demo_wheel", "max_itl_ms", "max_queue_tokens"}
    not_set |= {"admin_api_key", "checkpoint_dir", "api_key_file", "tls_cert", "tls_key"}
    not_set |= {"kv_cache_max_memory_bytes", "swap_max_memory_bytes"}
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
