"""Settings: frozen dataclasses, filled from defaults < YAML file < other servers' files < environment < `--set`.

A role's configuration is a few *sections*, each a frozen dataclass whose fields were
declared with `setting()` (or are such dataclasses themselves):

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DecodeNodeConfig:
        max_running_sequences: int = setting(64, at_least=1, help="Sequences in the running batch.")

A key is a dotted path, `decode_node.max_running_sequences`; its environment variable is
`OUTRIDER_DECODE_NODE__MAX_RUNNING_SEQUENCES`. All roles may share one file: a role
ignores the sections of the others, and nothing else.
"""

from __future__ import annotations

from outrider.config.arguments import parse_role_arguments
from outrider.config.resolve import CONFIG_FILE_VARIABLE, ResolvedConfig, environment_name, load_config
from outrider.config.schema import config_schema
from outrider.config.settings import SettingInfo, describe_settings, fixed, setting
from outrider.config.values import format_value

__all__ = [
    "CONFIG_FILE_VARIABLE",
    "ResolvedConfig",
    "SettingInfo",
    "config_schema",
    "describe_settings",
    "environment_name",
    "fixed",
    "format_value",
    "load_config",
    "parse_role_arguments",
    "setting",
]
