"""The towers of the families, by the model_type of their config.json."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.encoders.blocks import BlockKind, Norm, Product, Rotation, Sliced
from penstock.engine.encoders.vision.pixels import CLIP, HALVES
from penstock.engine.encoders.vision.tower import MAX_WIDTH, Grid, Keys, Tower, TowerSource
from penstock.engine.files.json_file import Fields

_CHANNELS = 3
_MAX_POSITIONS = 2**20
_MAX_POOLED = 64
_MOST_SOFT_TOKENS = 1120  # that Gemma 4 can be asked for, an image


class QwenTower(Tower):
    """The tower of Qwen3.5. Patches that become one row of the decoder are one after another."""

    kind = BlockKind(
        norms=("norm1", "norm2"),
        qkv=("attn.qkv",),
        output="attn.proj",
        up=("mlp.linear_fc1",),
        down="mlp.linear_fc2",
    )
    prefix = "model.visual."
    blocks_prefix = "blocks."
    keys = Keys(layers="depth", heads="num_heads")
    default_norm = CLIP
    default_deepstack: tuple[int, ...] = ()

    def __init__(self, source: TowerSource) -> None:
        super().__init__(source)
        vision, weights, hidden = source.vision, source.weights, self.sizes.hidden_size
        self.pooled = vision.count("spatial_merge_size", default=2, most=_MAX_POOLED)
        self._frequencies = _frequencies(vision, self.sizes.head_dim, 10_000.0, self.device)
        window = (vision.count("temporal_patch_size", default=2, most=16), self.side, self.side)
        self.patch = weights.product(f"{self.prefix}patch_embed.proj", hidden, _CHANNELS, *window)
        num = vision.count("num_position_embeddings", default=48**2, most=_MAX_POSITIONS)
        self._table_side = int(num**0.5)
        self._table = weights.table(f"{self.prefix}pos_embed.weight", num, hidden)
        self._merger = self._read_merger("merger", hidden)
        if self.default_deepstack:
            self.deepstack = self._read_deepstack(vision)
        self._mergers = [
            self._read_merger(f"deepstack_merger_list.{index}", hidden * self.pooled**2)
            for index in range(len(self.deepstack))
        ]
        size = Fields(source.images.path, source.images.mapping("size"))
        pixels = source.images.count("max_pixels", default=28 * 28 * 1280)
        self.max_patches = size.count("longest_edge", default=pixels) // self.side**2

    def _read_merger(self, name: str, normed_size: int) -> tuple[Norm, Product, Product]:
        name, wide = self.prefix + name, self.sizes.hidden_size * self.pooled**2
        return (
            self.weights.norm(f"{name}.norm", normed_size, 1e-6),
            self.weights.product(f"{name}.linear_fc1", wide, wide),
            self.weights.product(f"{name}.linear_fc2", self.hidden_size, wide),
        )

    def _read_deepstack(self, vision: Fields) -> tuple[int, ...]:
        name = "deepstack_visual_indexes"
        value = vision.get(name, list(self.default_deepstack))
        known = range(len(self.blocks))
        if not isinstance(value, list) or sorted({*value} & {*known}) != value:
            raise vision.wrong(name, f"ascending numbers of the {len(known)} blocks", value)
        return tuple(value)

    def places(self, grid: Grid) -> Tensor:
        side = self.pooled
        size = (grid.height // side, grid.width // side, side, side)
        patches = torch.arange(grid.height * grid.width, device=self.device)
        upper, left, row, column = torch.unravel_index(patches, size)
        places = torch.stack((upper * side + row, left * side + column))
        return places.repeat(1, grid.frames)

    def positions(self, places: Tensor, grid: Grid) -> Tensor:
        """Those of a square table, between whose corners the image is stretched."""
        side, taps, shares = self._table_side, [], []
        for place, size in zip(places, (grid.height, grid.width), strict=True):
            at = place.float() * (side - 1) / max(size - 1, 1)
            low = at.floor()
            taps.append(torch.stack((low, low + 1), -1).long().clamp(max=side - 1))
            shares.append(torch.stack((1 - (at - low), at - low), -1))
        corners = (taps[0][:, :, None] * side + taps[1][:, None]).flatten(1)
        share = (shares[0][:, :, None] * shares[1][:, None]).flatten(1)
        return (self._table[corners] * share[..., None]).sum(1)

    def rotation(self, places: Tensor) -> Rotation:
        row, column = places[..., None] * self._frequencies
        return Rotation.by(torch.cat((row, column), -1)[:, None])

    def finish(self, states: Tensor, grid: Grid) -> Sliced:
        return self._merged(states, self._merger)

    def stacked(self, states: Tensor, index: int) -> Sliced:
        return self._merged(states, self._mergers[index])

    def _merged(self, states: Tensor, merger: tuple[Norm, Product, Product]) -> Sliced:
        norm, first, second = merger
        squares = states.view(-1, states.shape[1] * self.pooled**2)
        normed_size = len(norm.weight) if norm.weight is not None else 0

        def normed(x: Tensor) -> Tensor:
            return norm(x.view(len(x), -1, normed_size)).flatten(1)

        return self.by_rows(squares, normed, first, functional.gelu, second)


class Qwen3VLTower(QwenTower):
    default_deepstack = (8, 16, 24)


class Gemma3Tower(Tower):
    """SigLIP of images of one size, whose patches become fewer rows by their averages."""

    kind = BlockKind(
        norms=("layer_norm1", "layer_norm2"),
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.out_proj",
        up=("mlp.fc1",),
        down="mlp.fc2",
    )
    prefix = "model.vision_tower."
    blocks_prefix = "encoder.layers."
    keys = Keys(eps="layer_norm_eps")
    default_norm = HALVES

    def __init__(self, source: TowerSource) -> None:
        super().__init__(source)
        vision, weights, hidden = source.vision, source.weights, self.sizes.hidden_size
        embeddings, eps = f"{self.prefix}embeddings", self.sizes.eps
        self.patch = weights.product(
            f"{embeddings}.patch_embedding", hidden, _CHANNELS, self.side, self.side
        )
        self._grid_side = vision.count("image_size", most=MAX_WIDTH) // self.side
        self.max_patches = self._grid_side**2
        self._table = weights.table(
            f"{embeddings}.position_embedding.weight", self.max_patches, hidden
        )
        num_tokens = source.outer.count("mm_tokens_per_image", default=256)
        self.pooled = max(1, self._grid_side // int(num_tokens**0.5))
        if num_tokens * self.pooled**2 != self.max_patches:
            kind = f"a square of which the {self.max_patches} patches of an image are a multiple"
            raise source.outer.wrong("mm_tokens_per_image", kind, num_tokens)
        self._norm = weights.norm(f"{self.prefix}post_layernorm", hidden, eps)
        projector = "model.multi_modal_projector.mm_"
        scale = weights.vector(f"{projector}soft_emb_norm.weight", hidden)
        self._scale = Norm(scale + 1, None, eps, is_rms=True)
        self._projection = weights.transposed(
            f"{projector}input_projection_weight", hidden, self.hidden_size
        )

    def positions(self, places: Tensor, grid: Grid) -> Tensor:
        assert grid == (1, self._grid_side, self._grid_side), grid
        return self._table[places[0] * self._grid_side + places[1]]

    def finish(self, states: Tensor, grid: Grid) -> Sliced:
        pooled = yield from self.average(states, grid, self._norm)
        x = pooled.to(states.dtype)
        return (yield from self.by_rows(x, self._scale, self._projection))


class Gemma4Tower(Tower):
    """Gemma 4's, of images of any shape, whose patches become fewer rows by their averages."""

    kind = BlockKind(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
        output="self_attn.o_proj.linear",
        up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
        down="mlp.down_proj.linear",
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        is_rms=True,
        has_bias=False,
        scale=1.0,
    )
    prefix = "model.vision_tower."
    blocks_prefix = "encoder.layers."
    keys = Keys(eps="rms_norm_eps", activation="hidden_activation")
    has_channels_last = True

    def __init__(self, source: TowerSource) -> None:
        super().__init__(source)
        vision, weights, hidden = source.vision, source.weights, self.sizes.hidden_size
        num_kv = vision.count("num_key_value_heads", default=self.sizes.num_heads)
        if num_kv != self.sizes.num_heads:
            raise vision.wrong("num_key_value_heads", f"{self.sizes.num_heads}, one a head", num_kv)
        self.pooled = vision.count("pooling_kernel_size", default=3, most=_MAX_POOLED)
        self._frequencies = _frequencies(vision, self.sizes.head_dim, 100.0, self.device)
        patches = f"{self.prefix}patch_embedder"
        window = (_CHANNELS * self.side**2,)
        self.patch = weights.product(f"{patches}.input_proj", hidden, *window, has_bias=False)
        num = vision.count("position_embedding_size", default=10 * 1024, most=_MAX_POSITIONS)
        self._table = weights.table(f"{patches}.position_embedding_table", 2, num, hidden)
        num_tokens = source.images.count("max_soft_tokens", default=280)
        self.max_patches = max(num_tokens, _MOST_SOFT_TOKENS) * self.pooled**2
        self._standard = None
        if vision.flag("standardize"):
            names = (f"{self.prefix}std_{each}" for each in ("bias", "scale"))
            self._standard = [weights.vector(name, hidden, dtype=torch.float32) for name in names]
        self._norm = Norm(None, None, self.sizes.eps, is_rms=True)
        self._projection = weights.product(
            "model.embed_vision.embedding_projection", self.hidden_size, hidden, has_bias=False
        )

    def numbers(self, patches: Tensor) -> Tensor:
        return 2 * (super().numbers(patches) - 0.5)

    def positions(self, places: Tensor, grid: Grid) -> Tensor:
        row, column = places
        return self._table[0][column].float() + self._table[1][row].float()

    def rotation(self, places: Tensor) -> Rotation:
        row, column = places[..., None] * self._frequencies
        return Rotation.by(torch.stack((column, row), 1))

    def finish(self, states: Tensor, grid: Grid) -> Sliced:
        x = yield from self.average(states, grid)
        x *= self.sizes.hidden_size**0.5
        if self._standard is not None:
            x = (x - self._standard[0]) * self._standard[1]
        return (yield from self.by_rows(x.to(states.dtype), self._norm, self._projection))


TOWERS: Mapping[str, type[Tower]] = {
    "qwen3_vl": Qwen3VLTower,
    "qwen3_vl_moe": Qwen3VLTower,
    "qwen3_5": QwenTower,
    "qwen3_5_moe": QwenTower,
    "gemma3": Gemma3Tower,
    "gemma4": Gemma4Tower,
}


def _frequencies(vision: Fields, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """What a place is multiplied by, for one of two halves of a head: (head_dim / 4,)."""
    rope = Fields(f"{vision.path}: rope_parameters", vision.mapping("rope_parameters"))
    if (kind := rope.text("rope_type")) not in (None, "axial", "default"):
        raise rope.wrong("rope_type", "'axial'", kind)
    half = head_dim // 2
    if half % 2:
        raise vision.wrong("head_dim", "a multiple of 4", head_dim)
    powers = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    return 1.0 / rope.number("rope_theta", theta) ** powers
