"""What is kept of the steps that ran."""

from penstock.scheduler.stats import StepClass
from penstock.scheduler.step_model.samples import StepSamples, sample_of
from tests.support.made_up_steps import made_up_steps


def test_a_server_that_decodes_all_day_remembers_its_prompts() -> None:
    samples = StepSamples()
    steps = list(made_up_steps(3000))
    prompts = [s for s in steps if s.kind is StepClass.PREFILL][:300]
    decode = next(s for s in steps if s.kind is StepClass.DECODE)
    for sample in prompts:
        samples.add(sample)
    num_prompts = len(samples.all())
    for number in range(10_000):
        samples.add(decode._replace(number=3000 + number))
    kept = samples.all()
    assert sum(s.kind is StepClass.PREFILL for s in kept) == num_prompts > 0
    decodes = [s.number for s in kept if s.kind is StepClass.DECODE]
    assert 50 < len(decodes) < 100 and decodes == sorted(decodes)
    assert min(decodes) > 3000 and max(decodes) > 12_800  # old ones go
    assert max(decodes) - min(decodes) > 500  # not all of the same moment


def test_the_first_steps_of_a_kind_are_left_out() -> None:
    samples = StepSamples()
    one = next(iter(made_up_steps(1)))
    for number in range(4):
        samples.add(one._replace(number=number))
    assert [s.number for s in samples.all()] == [2, 3]
    samples.warm_up()
    for number in range(4, 8):
        samples.add(one._replace(number=number))
    assert [s.number for s in samples.all()] == [2, 3, 6, 7]


def test_a_device_that_was_hidden_behind_the_host_has_no_time() -> None:
    kind, amounts = one = next((s.kind, s.amounts) for s in made_up_steps(1))
    hidden, seen = (
        sample_of(1, *one, wait_s=wait_s, host_s=1.0, runs_ahead=True) for wait_s in (0.01, 2.0)
    )
    assert hidden.device_s is None and hidden.cycle_s == 1.01
    assert seen.device_s == 3.0
    assert sample_of(1, kind, amounts, wait_s=2.0, host_s=1.0, runs_ahead=False).device_s == 2.0
