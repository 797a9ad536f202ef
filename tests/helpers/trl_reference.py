"""TRL's own loss functions, called without a run: its trainers' methods on objects that have only what those methods read."""

import functools
import importlib
import inspect
import sys
import textwrap
import warnings
from collections import defaultdict
from types import SimpleNamespace

import torch

ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    reduce=lambda x, reduction: x,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    unwrap_model=lambda model: model,
)
OUTPUTS = "log_probs", "entropy", "mean_logits", "is_top1"
"""The arrays that TRL's losses and metrics read of a model's fused head."""


def dpo_trainer(loss_type: str, beta: float, ref_model=None):
    return _bare(
        _of_trl("trainer.dpo_trainer", "DPOTrainer"),
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=ref_model is None,
        ref_model=ref_model,
    )


def kto_trainer(beta: float, weights=(1.0, 1.0), ref_model=None):
    return _bare(
        _of_trl("trainer.kto_trainer", "KTOTrainer"),
        loss_type="kto",
        calculate_KL=True,
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        precompute_ref_logps=ref_model is None,
        ref_model=ref_model,
    )


def orpo_trainer(beta: float):
    return _bare(_of_trl("experimental.orpo.orpo_trainer", "ORPOTrainer"), beta=beta, is_encoder_decoder=False, padding_value=0)


def cpo_trainer(loss_type: str, beta: float, gamma: float = 0.0, label_smoothing: float = 0.0):
    """SimPO is CPO's loss "simpo" without cross-entropy. Its "sigmoid" of log-ratios is DPO's loss with smoothed labels."""
    return _bare(
        _of_trl("experimental.cpo.cpo_trainer", "CPOTrainer"),
        loss_type=loss_type,
        beta=beta,
        simpo_gamma=gamma,
        label_smoothing=label_smoothing,
        alpha=0.0,
        cpo_alpha=0.0,
        is_encoder_decoder=False,
        pad_token_id=0,
    )


def grpo_trainer(
    log_probs_of, *, level="token", clip=(0.2, 0.2), delta=None, bias_correction=True, use_vllm=False, **attributes
):
    """Returns a GRPO trainer whose model's log-probabilities, entropies and auxiliary loss are log_probs_of(model, inputs).

    `attributes` are loss_type, beta, max_completion_length, off_policy_mask_threshold.
    """
    trainer = _bare(
        _of_trl("trainer.grpo_trainer", "GRPOTrainer"),
        importance_sampling_level=level,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        use_vllm=use_vllm,
        vllm_importance_sampling_correction=use_vllm,
        top_entropy_quantile=1.0,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda model, *inputs, **_: log_probs_of(model, *inputs),
        **attributes,
    )
    options = dict(delta=delta, use_bias_correction_kl=bias_correction, steps_per_generation=1)
    trainer.__dict__["args"] = SimpleNamespace(gradient_checkpointing_kwargs=None, **options)
    return trainer


def run_grpo(first: str, last: str, **names) -> dict:
    """Runs the statements of TRL's GRPO trainer between two texts, on these variables; returns all variables afterwards."""
    kind = _of_trl("trainer.grpo_trainer", "GRPOTrainer")
    source = inspect.getsource(kind._generate_and_score_completions)
    begin = source.rindex("\n", 0, source.index(first)) + 1
    found = vars(sys.modules[kind.__module__]) | names
    exec(textwrap.dedent(source[begin : source.rindex("\n", 0, source.index(last, begin))]), found)
    return found


def with_fused_head(model):
    """Returns a transformers model whose calls give the arrays that DPO and KTO trainers read."""
    _of_trl("trainer.utils", "add_fused_lm_head")(model, outputs=OUTPUTS)
    return model.train()


def metrics_of(trainer) -> dict[str, float]:
    """Returns the metrics that the last loss of a DPO or KTO trainer logged."""
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


class GivenLogProbs(torch.nn.Module):
    """A model whose log-probabilities [rows, seq - 1] are given, a call after the other."""

    def __init__(self, *log_probs: torch.Tensor):
        super().__init__()
        self.given = list(log_probs)

    def forward(self, **kwargs):
        log_probs = self.given.pop(0)
        zeros = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def _bare(kind, **attributes):
    """Returns a trainer that was never initialised, with these attributes."""
    trainer = object.__new__(kind)
    common = dict(accelerator=ACCELERATOR, aux_loss_enabled=False, _total_train_tokens=0, _tp_size=1)
    common["_metrics"] = {"train": defaultdict(list)}
    trainer.__dict__.update(common | attributes)
    model = trainer.__dict__["model"] = torch.nn.Module().train()
    model.is_gradient_checkpointing = False
    trainer.__dict__["args"] = SimpleNamespace(gradient_checkpointing_kwargs=None)
    return trainer


@functools.cache
def _of_trl(module: str, name: str):
    """Returns an object of TRL, whose import takes 4 seconds: processes that run none of these tests save them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"trl.{module}"), name)
