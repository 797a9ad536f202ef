"""Runs of reinforcement learning with a policy that draws without a model: settings, log, journal, resume."""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from flax import nnx

from moe_jax.adapters import LoraSettings
from moe_jax.commands.config_file import with_config
from moe_jax.commands.grpo import GROUPS, OTHERS, GrpoCommand
from moe_jax.parallel.choices import MeshShape
from moe_jax.recipes import GrpoSettings, dry_run, grpo
from moe_jax.recipes.grpo import loop, prepare
from moe_jax.recipes.grpo.settings import EngineSizes
from moe_jax.recipes.run.folder import write_settings
from moe_jax.reinforcement.settings import LossSettings
from moe_jax.train.metrics import read_records
from tests.helpers import tiny
from tests.helpers.fake_policy import FakePolicy

TRL = {
    *("step", "reward", "reward_std", "frac_reward_zero_std", "rewards/letters_a/mean", "rewards/letters_a/std"),
    *(f"completions/{of}_{kind}length" for of in ("mean", "min", "max") for kind in ("", "terminated_")),
    *("completions/clipped_ratio", "entropy", "num_tokens", "step_time", "learning_rate", "grad_norm", "loss"),
}
OURS = {
    *("total_loss", "mismatch_tokens", "audited_tokens", "time/rollout", "time/rewards", "time/update", "time/sync"),
    *("time/audit", "tokens_per_second", "model_tflops", "groups_dropped", "weights_version"),
}


def letters_a(completions, **columns):
    return [text.count("a") / len(text) for text in completions]


def all_equal(completions, **columns):
    return [1.0] * len(completions)


def write(folder, name="prompts.jsonl", number=7):
    file = folder / name
    file.write_text("".join(json.dumps({"prompt": f"{name} {i}:", "answer": str(i)}) + "\n" for i in range(number)))
    return str(file)


def settings(folder, **changes):
    options = dict(
        model="none", data=write(folder), output=str(folder / "run"), prompts=3, samples=4, max_new_tokens=6, steps=5,
        seq_len=64, dtype="float32", checkpoint_every=2, exact=True,
    )  # fmt: skip
    return GrpoSettings(**{**options, **changes})


@pytest.fixture
def policies(monkeypatch):
    """All policies of the test, which draw without a model."""
    made = []

    class Noted(FakePolicy):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(loop, "Policy", Noted)
    monkeypatch.setattr(prepare, "check_architecture", lambda *_, **__: None)
    return made


def run(chosen, rewards=(letters_a,), make_model=tiny.dense, **options):
    return grpo(chosen, rewards=rewards, model=make_model(), tokenizer=tiny.tokenizer(), **options)


def test_the_log_has_the_metrics_of_trl_and_ours(tmp_path, policies, capsys):
    seen = []
    result = run(settings(tmp_path), on_step=seen.append)
    assert result.finished and [record["step"] for record in result.metrics] == [1, 2, 3, 4, 5] and seen == result.metrics
    assert result.metrics[0].keys() == TRL | OURS
    samples = read_records(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 5 and all(len(record["samples"]) == 12 for record in samples)
    for record, of_step in zip(result.metrics, samples, strict=True):
        rewards = [each["reward"] for each in of_step["samples"]]
        assert np.isclose(record["reward"], np.mean(rewards)) and record["weights_version"] == record["step"] - 1
        assert np.isclose(record["rewards/letters_a/mean"], np.mean(rewards))
        lengths = [each["length"] for each in of_step["samples"]]
        assert record["completions/mean_length"] == pytest.approx(np.mean(lengths))
        assert record["completions/clipped_ratio"] == pytest.approx(np.mean([length == 6 for length in lengths]))
        assert [each["key"] for each in of_step["samples"][::4]] == list(range(3 * record["step"] - 3, 3 * record["step"]))
    printed = capsys.readouterr().out
    assert "7 prompts, loss dapo, rewards letters_a\nsteps 1 to 5, 3 prompts x 4 answers of up to 6 tokens a step" in printed
    assert f"step 1: reward {seen[0]['reward']:.3f}, length {seen[0]['completions/mean_length']:.0f}, loss" in printed
    assert policies[0].closed


def test_held_out_prompts_are_measured_and_not_learned(tmp_path, policies):
    held_out = write(tmp_path, "held_out.jsonl", 4)
    result = run(settings(tmp_path, eval_data=held_out, eval_every=2, eval_batches=2))
    measured = [record["step"] for record in result.metrics if "eval_reward" in record]
    assert measured == [2, 4, 5] and "eval_rewards/letters_a/mean" in result.metrics[1]
    asked = [keys for keys in policies[0].requests if keys[0] < 0]
    assert asked == [[-1, -2, -3, -4]] * 3
    without = settings(tmp_path, output=str(tmp_path / "without"))
    again = run(without)
    assert [record["reward"] for record in again.metrics] == [record["reward"] for record in result.metrics]
    with pytest.raises(ValueError, match="has the same contents as data"):
        run(settings(tmp_path, eval_data=write(tmp_path)))


def test_groups_without_spread_are_drawn_again(tmp_path, policies):
    def rarely(completions, **columns):
        return [float(text[0] == "a") for text in completions]

    chosen = settings(tmp_path, grpo=LossSettings(keep_groups="with_spread"), steps=3)
    result = run(chosen, [rarely])
    assert sum(record["groups_dropped"] for record in result.metrics) > 0
    for record, of_step in zip(result.metrics, read_records(tmp_path / "run" / "samples.jsonl"), strict=True):
        groups = {each["key"]: set() for each in of_step["samples"]}
        for each in of_step["samples"]:
            groups[each["key"]].add(each["reward"])
        assert all(len(rewards) > 1 for rewards in groups.values()) and record["frac_reward_zero_std"] == 0
        assert list(groups) == sorted(groups) and len(groups) <= 3
    keys = [key for asked in policies[0].requests for key in asked]
    assert keys == list(range(len(keys)))


def test_five_steps_of_equal_rewards_say_what_to_change(tmp_path, policies, capsys):
    run(settings(tmp_path, steps=7), [all_equal])
    printed = capsys.readouterr().out
    assert printed.count("for 5 steps all answers to a prompt have had equal rewards, so nothing was learned: give") == 1


def comparable(output):
    """All bytes that a run leaves, without times."""
    records = [
        {name: value for name, value in record.items() if not name.startswith(("time/", "step_time", "tokens_per", "model_tf"))}
        for record in read_records(output / "metrics.jsonl")
    ]
    return records, (output / "samples.jsonl").read_bytes()


@pytest.mark.parametrize(
    "exact, make_model, choices",
    [
        (True, tiny.dense, {}),
        (False, tiny.dense, dict(keep_groups="with_spread")),
        (False, tiny.model, {}),
    ],
    ids=["exact", "not exact", "with experts"],
)
def test_an_interrupted_rollout_continues_from_the_journal(tmp_path, policies, exact, make_model, choices):
    """The rewards of complete groups are not asked again, and the run ends with the bits of an unbroken one."""
    calls = []

    def once(completions, answer, seeds, **columns):
        if len(calls) in fails_at and not failed:
            failed.append(True)
            raise ConnectionError("the judge is away")
        calls.append(seeds[0])
        return [(seed % 5) / 5 for seed in seeds]

    chosen = settings(tmp_path, exact=exact, grpo=LossSettings(**choices))
    fails_at, failed = (), [True]
    whole = run(chosen, [once], make_model)
    expected, asked = comparable(tmp_path / "run"), list(calls)
    for place in (1, 10):
        calls, fails_at, failed = [], (place,), []
        broken = settings(tmp_path, exact=exact, grpo=LossSettings(**choices), output=str(tmp_path / f"broken{place}"))
        with pytest.raises((RuntimeError, ValueError), match="the judge is away"):
            run(broken, [once], make_model)
        resumed = run(broken, [once], make_model)
        assert comparable(Path(broken.output)) == expected
        assert sorted(calls) == sorted(asked)
        for a, b in zip(*(jax.tree.leaves(nnx.state(each.model, nnx.Param)) for each in (whole, resumed)), strict=True):
            np.testing.assert_array_equal(a, b)
        first = policies[-1].requests[0]
        assert len(first) == (3 - place % 3 if exact else 3)


def test_other_settings_do_not_read_the_journal(tmp_path, policies):
    """Even where no checkpoint tells that the run is another one."""
    run(settings(tmp_path), stop_after=1)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "moved")
    run(settings(tmp_path, max_new_tokens=5), stop_after=1)
    assert policies[-1].requests == [[0, 1, 2]]
    assert max(each["length"] for each in read_records(tmp_path / "run" / "samples.jsonl")[0]["samples"]) <= 5


def test_another_run_is_refused(tmp_path, policies):
    run(settings(tmp_path), stop_after=2)
    for changes, message in (
        (dict(samples=5), "samples: checkpoint 4, now 5"),
        (dict(grpo=LossSettings(loss="gspo")), "grpo.loss: checkpoint 'dapo', now 'gspo'"),
        (dict(engine=EngineSizes(max_length=32)), "max_prompt: checkpoint 58, now 26"),
    ):
        with pytest.raises(ValueError, match=f"holds another run; .*{message}"):
            run(settings(tmp_path, **changes))
    with pytest.raises(ValueError, match="holds another run; .*rewards: "):
        run(settings(tmp_path), [letters_a, all_equal])
    more = run(settings(tmp_path, steps=6))
    assert more.step == 6 and policies[-1].requests[0] == [6, 7, 8]


def test_the_journal_is_kept_from_the_oldest_checkpoint(tmp_path, policies):
    run(settings(tmp_path, steps=9, keep_checkpoints=2))
    [folder] = (tmp_path / "run" / "journal").iterdir()
    steps = sorted(int(path.name) for path in folder.iterdir())
    # A checkpoint is written in the background: the last one may not be complete at the end of the last step.
    assert steps[0] in (5, 7) and steps == list(range(steps[0], 10))


def test_long_prompts_are_left_out(tmp_path, policies, capsys):
    chosen = settings(tmp_path)
    with open(chosen.data, "a") as file:
        file.write(json.dumps({"prompt": "long " * 20, "answer": ""}) + "\n")
    run(chosen, stop_after=1)
    assert "7 prompts; 1 more have over 58 tokens and are left out, loss dapo" in capsys.readouterr().out


def test_dry_run_renders_two_prompts_and_calls_the_rewards(tmp_path, capsys):
    chosen = settings(tmp_path, dry_run=True, exact=False)
    dry_run(chosen, model=tiny.dense(), tokenizer=tiny.tokenizer(), rewards=[letters_a])
    printed = capsys.readouterr().out
    assert printed.count("the answer 'The answer is 42.' has the rewards {'letters_a': 0.05") == 2
    assert "prompts.jsonl " in printed and "dry run: nothing was trained or written" in printed and "predicted" not in printed
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="dry_run=True"):
        run(chosen)


def test_dry_run_predicts_time_and_memory(tmp_path, capsys):
    chosen = settings(tmp_path, dry_run=True, exact=False, dtype="bfloat16", lora=LoraSettings(rank=2), prompts=64)
    dry_run(chosen, model=tiny.dense(), tokenizer=tiny.tokenizer(), rewards=[letters_a])
    printed = capsys.readouterr().out
    assert "--- predicted for H200s, if all answers have 6 tokens\ndata fsdp batch-size pages" in printed
    assert "GiB of the first rollout: trainer 0.0, whole copy 0.0, engine 3.0, pages 0.0" in printed


class Letters:
    """A game: two answers, whose letters a are counted."""

    def reset(self, answer, **row):
        self.texts = []
        return f" Write a {answer} times."

    def respond(self, text):
        self.texts.append(text)
        return "again" if len(self.texts) < 2 else None

    def get_reward(self):
        return float("".join(self.texts).count("a"))


def test_an_environment_plays_the_dialogues_and_gives_rewards(tmp_path, policies):
    data = tmp_path / "games.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": "?"}], "answer": str(i)}) + "\n" for i in range(4))
    )
    chosen = settings(tmp_path, data=str(data), max_new_tokens=60, seq_len=256, steps=2, max_turns=2)
    result = run(chosen, [], environment=Letters)
    assert not policies[0].requests and "rewards/Letters/mean" in result.metrics[0]
    [first, *_] = read_records(tmp_path / "run" / "samples.jsonl")[0]["samples"]
    assert first["prompt"][0]["content"].startswith("? Write a ") and "Letters" in first["rewards"]
    again = run(replace(chosen, output=str(tmp_path / "again")), [], environment=Letters)
    assert comparable(tmp_path / "run") == comparable(tmp_path / "again") and again.finished


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(prompts=0), "prompts=0 must be an integer of at least 1"),
        (dict(samples=1), "samples=1 must be an integer of at least 2"),
        (dict(max_new_tokens=64), "max_new_tokens=64 leaves no room for a prompt in 64 tokens"),
        (dict(engine=EngineSizes(max_length=65)), "engine.max_length=65 must not exceed seq_len=64"),
        (dict(engine=EngineSizes(num_pages=0)), "engine.num_pages=0 must be an integer of at least 1"),
        (dict(gradient_accumulation=2, batch_size=2), "gradient_accumulation=2 is not for this run: an update has as many"),
        (dict(keep_best=True, eval_data="x"), "keep_best=True is not for this run"),
        (dict(data="nowhere.jsonl"), "data='nowhere.jsonl' does not exist"),
        (dict(on_mismatch="ask"), "on_mismatch='ask' must be one of stop, warn"),
        (dict(grpo=LossSettings(loss="ppo")), "loss='ppo' must be one of"),
        (dict(grpo=LossSettings(beta=0.1)), "grpo.beta=0.1 needs a reference, the model without adapters: set lora"),
        (dict(mesh=MeshShape(expert=2)), "splits its mesh over data and fsdp alone: leave out expert=2"),
        (dict(mesh=MeshShape(fsdp=2), engine=EngineSizes(replicas=4)), "replicas=4 must be 2, the devices of the mesh"),
        (
            dict(mesh=MeshShape(fsdp=2), lora=LoraSettings(targets=("attention",))),
            "exact=True merges adapters .* fsdp=2 splits them: use data",
        ),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changes)


def test_too_few_devices_are_named_before_weights_are_read(tmp_path):
    chosen = settings(tmp_path, exact=False, engine=EngineSizes(replicas=99))
    with pytest.raises(ValueError, match="engine.replicas=99 must be at most 1, the devices of this process"):
        prepare.plan_grpo(chosen, [letters_a], tiny.dense(), tiny.tokenizer())
    assert not (tmp_path / "run").exists()


def test_rewards_are_checked_before_anything_is_read(tmp_path):
    with pytest.raises(ValueError, match="there is no reward: give settings.reward, such as"):
        run(settings(tmp_path, exact=False), [])
    with pytest.raises(ValueError, match=r"reward_weights=\(1.0, 2.0\) must have a weight for each of the 1 rewards"):
        run(settings(tmp_path, exact=False, reward_weights=(1.0, 2.0)))
    with pytest.raises(ValueError, match="nothing"):
        run(settings(tmp_path, exact=False, reward=("nothing.py:correct",)))

    def of_solutions(completions, solution, tolerance=0, *, log_metric):
        return [0.0] * len(completions)

    with pytest.raises(
        ValueError, match="the reward function of_solutions needs solution; the data has the columns prompt, ans"
    ):
        run(settings(tmp_path, exact=False), [of_solutions])
    data = tmp_path / "without.jsonl"
    data.write_text('{"prompt": "1 + 1 ="}\n')
    with pytest.raises(ValueError, match="the reward function exact raised ValueError: needs the wanted answer in the column"):
        run(settings(tmp_path, exact=False, data=str(data), reward=("exact",)))
    assert not (tmp_path / "run").exists()


class WithoutReset:
    """An environment without `reset`."""


class OtherColumns(Letters):
    """An environment whose `reset` wants a column that the data lacks."""

    def reset(self, secret, answer, prompt):
        raise AssertionError


class Undocumented(Letters):
    """An environment whose tool has no docstring."""

    def tool(self, number: int):
        raise AssertionError


class Demanding(Letters):
    """An environment that cannot be made without arguments."""

    def __init__(self, sandbox):
        raise AssertionError


@pytest.mark.parametrize(
    "environment, message",
    [
        (WithoutReset, r"environment WithoutReset has no method reset\(\*\*row\)"),
        (OtherColumns, "environment OtherColumns: missing a required argument: 'secret'"),
        (Undocumented, "environment Undocumented: .*tool because it has no docstring"),
        (Demanding, "environment Demanding cannot be made: TypeError: .*sandbox"),
    ],
)
def test_environments_are_checked_before_the_model_is_made(tmp_path, environment, message):
    data = tmp_path / "games.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "?"}], "answer": "1"}\n')
    chosen = settings(tmp_path, data=str(data), exact=False)
    with pytest.raises(ValueError, match=message):
        run(chosen, environment=environment)
    with pytest.raises(ValueError, match="prompts.jsonl:1: an environment needs prompts of messages; this one is the text"):
        run(settings(tmp_path, exact=False), environment=Letters)
    broken = tiny.tokenizer("{% if messages | length == 1 %}?{% else %}-{% endif %}")
    with pytest.raises(ValueError, match="cannot continue a dialogue after an answer: it leaves the answer out"):
        grpo(chosen, environment=Letters, model=tiny.dense(), tokenizer=broken)
    assert not (tmp_path / "run").exists()


def test_dry_run_resets_an_environment(tmp_path, capsys):
    """A function that makes environments, too: its rewards count."""
    data = tmp_path / "games.jsonl"
    data.write_text('{"prompt": [{"role": "user", "content": "?"}], "answer": "1"}\n' * 2)
    chosen = settings(tmp_path, data=str(data), exact=False, dry_run=True)
    models = dict(model=tiny.dense(), tokenizer=tiny.tokenizer())
    dry_run(chosen, environment=lambda: Letters(), **models)
    printed = capsys.readouterr().out
    assert printed.count("user\n? Write a 1 times.") == 2 and "rewards <lambda>" in printed

    class Broken(Letters):
        def reset(self, **row):
            raise OSError("no sandbox")

    with pytest.raises(RuntimeError, match="reset raised OSError: no sandbox; prompt 0: "):
        dry_run(chosen, environment=Broken, **models)


def test_models_and_sizes_are_checked_before_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="exact=True: strict bits are not computed for this model: .*; or set exact=False"):
        run(settings(tmp_path))
    for lora, make_model, message in (
        (LoraSettings(rank=2), tiny.model, "exact=True merges adapters .* give lora.targets without experts"),
        (LoraSettings(rank=2, dropout=0.1), tiny.dense, "exact=True needs lora.dropout=0"),
    ):
        with pytest.raises(ValueError, match=message):
            run(settings(tmp_path, lora=lora), make_model=make_model)
    with pytest.raises(ValueError, match="weights='nf4' has no exact log-probabilities: leave it whole"):
        settings(tmp_path, lora=LoraSettings(rank=2), weights="nf4")
    with pytest.raises(ValueError, match="num_pages must be at least 2"):
        run(settings(tmp_path, engine=EngineSizes(num_pages=1)))
    with pytest.raises(ValueError, match="engine.num_pages=2 has room for 65 tokens; an answer with its prompt may have 128"):
        run(settings(tmp_path, seq_len=128, engine=EngineSizes(num_pages=2)))
    with pytest.raises(ValueError, match="the model has MTP modules"):
        run(settings(tmp_path, exact=False), make_model=lambda: tiny.deepseek(mtp=1))


def test_the_options_are_the_fields_of_the_settings(tmp_path):
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, *OTHERS, *GrpoSettings.NOT_READ]) == sorted(field.name for field in fields(GrpoSettings))
    required = dict(model="m", data=write(tmp_path), output="o")
    words = [word for name, value in required.items() for word in (f"--{name}", value)]
    assert tyro.cli(GrpoCommand, args=words).settings == GrpoSettings(**required)
    options = (
        "--reward a.py:f exact --reward-weights 1 0.5 --grpo.loss gspo --grpo.clip-low 1e-3 --engine.num-pages 9 --samples 4"
    )
    given = tyro.cli(GrpoCommand, args=[*words, *options.split()]).settings
    assert given == GrpoSettings(
        **required, reward=("a.py:f", "exact"), reward_weights=(1.0, 0.5), samples=4,
        grpo=LossSettings(loss="gspo", clip_low=1e-3), engine=EngineSizes(num_pages=9),
    )  # fmt: skip


def test_run_yaml_repeats_a_run(tmp_path):
    chosen = settings(tmp_path, grpo=LossSettings(clip_high=0.3), reward=("a.py:f",), engine=EngineSizes(num_pages=9))
    (tmp_path / "run").mkdir()
    write_settings(chosen, command="grpo", steps=chosen.steps, tokenizer=None)
    file = tmp_path / "run" / "run.yaml"
    assert "moe-jax grpo --config" in file.read_text()
    assert tyro.cli(GrpoCommand, args=with_config("grpo", ["--config", str(file)])).settings == chosen
