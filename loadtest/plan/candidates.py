"""`Candidate`: one device with one set of flags, which replicas repeat."""

import argparse
from dataclasses import dataclass
from itertools import product

from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.server import calibrated_server, planned_server
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig, PenstockError

NO_QUANTIZATION = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """price: of the device, an hour, in whatever currency; None where none was given.
    quantization: of the weights; None as they are."""

    device: str
    price: float | None
    quantization: str | None
    server: SimulatedServer

    @property
    def limits(self) -> tuple[int, int]:
        """--max-num-seqs and --max-num-batched-tokens."""
        config = self.server.scheduler
        return config.max_num_seqs, config.max_num_batched_tokens

    def __str__(self) -> str:
        seqs, tokens = self.limits
        weights = self.quantization or self.server.info.dtype
        return f"{self.device}, {weights} weights, {seqs} sequences, {tokens} tokens a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """name: of the model. note: how far its step times can be trusted. left_out: what cannot run,
    and why."""

    name: str
    note: str
    all: list[Candidate]
    left_out: list[str]


def make_candidates(args: argparse.Namespace) -> Candidates:
    """Raises InvalidConfig where none of them can run."""
    if (args.calibration is None) == (args.model_dir is None):
        raise InvalidConfig(
            "give either --calibration, a file of penstock calibrate, or a model's directory and "
            "--device; see penstock plan --help"
        )
    prices = _prices(args)
    if args.calibration is not None:
        return _calibrated(args, prices[0])
    return _planned(args, prices)


def _prices(args: argparse.Namespace) -> list[float | None]:
    """One for each device."""
    num, prices = max(1, len(args.devices or ())), args.price_per_gpu_hour
    if prices is None:
        if num > 1:
            raise InvalidConfig(
                "devices are compared by what they cost; give --price-per-gpu-hour, one for each "
                "--device"
            )
        return [None]
    if len(prices) != num or not all(price > 0 for price in prices):
        raise InvalidConfig(
            f"--price-per-gpu-hour must have {num} positive number{'s'[: num > 1]}, one for each "
            f"--device; it has {len(prices)}"
        )
    return list(prices)


def _calibrated(args: argparse.Namespace, price: float | None) -> Candidates:
    for flag, value in (("--device", args.devices), ("--quantization", args.quantization)):
        if value is not None:
            raise InvalidConfig(f"{flag} is that of --calibration; remove it")
    made, left_out = [], []
    args.device = None
    for seqs, tokens in product(args.seqs or (None,), args.tokens or (None,)):
        args.max_num_seqs, args.max_num_batched_tokens = seqs, tokens
        try:
            named = calibrated_server(args)
        except InvalidConfig as error:
            if (args.seqs, args.tokens) == (None, None):
                raise
            left_out.append(str(error))
            continue
        info = named.server.info
        quantization = info.quantization.method if info.quantization else None
        made.append(
            Candidate(
                device=info.device, price=price, quantization=quantization, server=named.server
            )
        )
    return _checked(made, left_out, named.name if made else "", named.note if made else "")


# Those that differ enough to matter for a GPU, and not so many that a plan takes an hour.
_SEQS, _TOKENS = (128, 256, 512), (1024, 2048, 8192)
_WEIGHTS = (NO_QUANTIZATION, "int8")


def _planned(args: argparse.Namespace, prices: list[float | None]) -> Candidates:
    if not args.devices:
        raise InvalidConfig("give the --device on which the model would run, such as H200")
    made, left_out, named = [], dict[str, None](), None
    for (device, price), weights, seqs, tokens in product(
        zip(args.devices, prices, strict=True),
        args.quantization or _WEIGHTS,
        args.seqs or _SEQS,
        args.tokens or _TOKENS,
    ):
        quantization = None if weights == NO_QUANTIZATION else weights
        try:
            scheduler = SchedulerConfig(
                max_num_seqs=seqs,
                max_num_batched_tokens=tokens,
                enable_prefix_caching=args.enable_prefix_caching is not False,
            )
            named = planned_server(args, device, args.memory_gb, quantization, scheduler)
        except PenstockError as error:
            left_out[f"{device}, {weights} weights, {seqs} sequences: {error}"] = None
            continue
        made.append(
            Candidate(device=device, price=price, quantization=quantization, server=named.server)
        )
    return _checked(made, list(left_out), named.name if named else "", named.note if named else "")


def _checked(made: list[Candidate], left_out: list[str], name: str, note: str) -> Candidates:
    if not made:
        raise InvalidConfig(
            f"no candidate can run: {left_out[0]}; a plan has replicas of one device each, without "
            "tensor or pipeline parallelism"
        )
    return Candidates(name=name, note=note, all=made, left_out=left_out)
