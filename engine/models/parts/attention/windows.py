"""How many positions the layers of each family attend to, by its config.json."""

from penstock.engine.files.json_file import Fields
from penstock.engine.models.errors import InvalidModel

# A layer's number says how many positions a token attends to, its own included; None for all.
Windows = tuple[int | None, ...]

SLIDING, FULL = "sliding_attention", "full_attention"
_QWEN = {"sliding_window": 4096}  # where config.json has no such key


def no_window(fields: Fields, num_layers: int) -> Windows:
    _check_layer_types(fields, FULL)
    return (None,) * num_layers


def all_or_none(fields: Fields, num_layers: int) -> Windows:
    """One window for every layer, or null for none."""
    window = _window(fields)
    _check_layer_types(fields, FULL if window is None else SLIDING)
    return (window,) * num_layers


def qwen(fields: Fields, num_layers: int) -> Windows:
    first = fields.count("max_window_layers", default=28, least=0)
    default = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return unless_off(fields, num_layers, default)


def unless_off(fields: Fields, num_layers: int, default: list[str]) -> Windows:
    """None unless use_sliding_window, and then in the layers that layer_types names.

    default: the kind of each layer, where config.json has no layer_types.
    """
    window = _window(fields if "sliding_window" in fields else fields.with_defaults(_QWEN))
    if not fields.flag("use_sliding_window"):
        window = None
    return _by_kind(_layer_types(fields, num_layers, default), window)


def by_layer_types(fields: Fields, num_layers: int, default: list[str]) -> Windows:
    """default: see `unless_off`."""
    return _by_kind(_layer_types(fields, num_layers, default), _window(fields))


def full_every(interval: int, fields: Fields, num_layers: int, *, first: int = -1) -> Windows:
    """As layer_types says; without, one of each `interval` layers attends to all positions: the
    last, or that of the number `first`."""
    is_full = [(index - first) % interval == 0 for index in range(num_layers)]
    default = [FULL if each else SLIDING for each in is_full]
    window = fields.count("sliding_window")
    return _by_kind(_layer_types(fields, num_layers, default), window)


def _layer_types(fields: Fields, num_layers: int, default: list[str]) -> list[str]:
    """Raises InvalidModel unless it is one kind for each layer."""
    kinds = fields.names("layer_types") or default
    if len(kinds) != num_layers or not set(kinds) <= {SLIDING, FULL}:
        raise InvalidModel(
            f"{fields.path}: layer_types must be 'full_attention' or 'sliding_attention' for each "
            f"of {num_layers} layers; other kinds are not supported"
        )
    return kinds


def _by_kind(kinds: list[str], window: int | None) -> Windows:
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _window(fields: Fields) -> int | None:
    if fields.get("sliding_window") is None:
        return None
    return fields.count("sliding_window")


def _check_layer_types(fields: Fields, kind: str) -> None:
    """For a family whose layers are all of one kind."""
    kinds = fields.names("layer_types")
    if kinds is not None and not set(kinds) <= {kind}:
        raise InvalidModel(
            f"{fields.path} has layer_types other than {kind!r}, which is not supported for "
            "this architecture"
        )
