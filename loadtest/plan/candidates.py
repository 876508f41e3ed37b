"""`Candidate`: a server with its flags, on one or several devices, which replicas repeat."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from penstock.loadtest.simulate.replica import SimulatedServer
from penstock.loadtest.simulate.server import (
    NamedServer,
    calibrated_server,
    check_source,
    planned_server,
)
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import InvalidConfig, PenstockError

NO_QUANTIZATION = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """price: of one device, an hour, in whatever currency; None where none was given.
    quantization: of the weights; None as they are."""

    device: str
    price: float | None
    quantization: str | None
    server: SimulatedServer

    @property
    def limits(self) -> tuple[int, int]:
        """--max-num-seqs and --max-num-batched-tokens."""
        config = self.server.scheduler
        return config.max_num_seqs, config.max_step_tokens

    @property
    def ranks(self) -> tuple[int, int]:
        """TP and PP."""
        info = self.server.info
        return info.tensor_parallel_size, info.pipeline_parallel_size

    @property
    def num_devices(self) -> int:
        """The devices of one replica. On a processor, all ranks are on one machine."""
        tensor_size, num_stages = self.ranks
        return 1 if self.server.info.computed_by else tensor_size * num_stages

    @property
    def replica_price(self) -> float | None:
        """The price of one replica, an hour."""
        return None if self.price is None else self.price * self.num_devices

    def __str__(self) -> str:
        (seqs, tokens), (tensor_size, num_stages) = self.limits, self.ranks
        weights = self.quantization or self.server.info.dtype
        return (
            f"{self.device}, TP {tensor_size} x PP {num_stages}, {weights} weights, {seqs} "
            f"sequences, {tokens} tokens a step"
        )


@dataclass(slots=True)
class Candidates:
    """name: the model's. notes: how far its step times can be trusted. left_out: why others cannot
    run."""

    name: str = ""
    notes: list[str] = field(default_factory=list)
    all: list[Candidate] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(
        self, named: NamedServer, device: str, price: float | None, quantization: str | None
    ) -> None:
        self.name = self.name or named.name
        if named.note not in self.notes:
            self.notes.append(named.note)
        self.all.append(
            Candidate(device=device, price=price, quantization=quantization, server=named.server)
        )

    def leave_out(self, why: str) -> None:
        if why not in self.left_out:
            self.left_out.append(why)


def make_candidates(args: argparse.Namespace) -> Candidates:
    """Raises InvalidConfig where none of them can run."""
    check_source(args, "penstock plan")
    prices, candidates = _prices(args), Candidates()
    if args.calibration is not None:
        _add_calibrated(candidates, args, prices[0])
    else:
        _add_planned(candidates, args, prices)
    if not candidates.all:
        raise InvalidConfig(f"no candidate can run: {candidates.left_out[0]}")
    return candidates


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


def _add_calibrated(candidates: Candidates, args: argparse.Namespace, price: float | None) -> None:
    for flag, value in (("--device", args.devices), ("--quantization", args.quantization)):
        if value is not None:
            raise InvalidConfig(f"{flag} is that of --calibration; remove it")
    args.device = None
    values = (args.sizes, args.seqs, args.tokens)
    for chosen in product(*(each or (None,) for each in values)):
        args.tensor_parallel_size, args.max_num_seqs, args.max_num_batched_tokens = chosen
        try:
            named = calibrated_server(args)
        except InvalidConfig as error:
            if values == (None, None, None):
                raise
            candidates.leave_out(str(error))
            continue
        info = named.server.info
        quantization = info.quantization.method if info.quantization else None
        candidates.add(named, info.device, price, quantization)


# Those that differ enough to matter for a GPU, and not so many that a plan takes an hour.
_SEQS, _TOKENS = (128, 256, 512), (1024, 2048, 8192)
_WEIGHTS = (NO_QUANTIZATION, "int8")


def _add_planned(
    candidates: Candidates, args: argparse.Namespace, prices: list[float | None]
) -> None:
    if not args.devices:
        raise InvalidConfig("give the --device on which the model would run, such as H200")
    for (device, price), weights in product(
        zip(args.devices, prices, strict=True), args.quantization or _WEIGHTS
    ):
        quantization = None if weights == NO_QUANTIZATION else weights
        for size in args.sizes or _sizes_that_fit(args, device, quantization):
            for limits in _limits(args):
                try:
                    named = _named_server(args, device, quantization, size, limits)
                except PenstockError as error:
                    what = f"{device}, TP {size}, {weights} weights, {limits[0]} sequences"
                    candidates.leave_out(f"{what}: {error}")
                    continue
                candidates.add(named, device, price, quantization)


def _limits(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    return product(args.seqs or _SEQS, args.tokens or _TOKENS)


def _sizes_that_fit(
    args: argparse.Namespace, device: str, quantization: str | None
) -> tuple[int, ...]:
    """1 where one device is enough; else also the fewest that are, and twice as many, which may be
    faster by more than they cost. 1 stays, so that it is said why it is not enough."""
    # Not at the top: it imports torch, and a calibrated server does not need it.
    from penstock.engine.sizing.planned_model import MACHINE_SIZES

    for size in MACHINE_SIZES:
        try:
            _named_server(args, device, quantization, size, next(_limits(args)))
        except PenstockError:
            continue
        if size > 1:
            return (1, *(each for each in (size, 2 * size) if each in MACHINE_SIZES))
        break
    return (1,)


def _named_server(
    args: argparse.Namespace,
    device: str,
    quantization: str | None,
    size: int,
    limits: tuple[int, int],
) -> NamedServer:
    seqs, tokens = limits
    scheduler = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=args.enable_prefix_caching is not False,
    )
    return planned_server(args, device, quantization, scheduler, tensor_parallel_size=size)
