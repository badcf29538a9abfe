"""Settings: frozen dataclasses. Precedence: defaults < YAML file < other servers' files < environment < `--set`.

A role's configuration consists of a few *sections*, each a frozen dataclass whose fields are
declared with `setting()` (or are such dataclasses themselves):

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DecodeNodeConfig:
        max_running_sequences: int = setting(64, at_least=1, help="Sequences in the running batch.")

A key is a dotted path, `decode_node.max_running_sequences`; its environment variable is
`OUTRIDER_DECODE_NODE__MAX_RUNNING_SEQUENCES`. All roles may share one file: a role ignores
only the sections of other roles.
"""
