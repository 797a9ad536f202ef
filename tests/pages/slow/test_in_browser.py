"""Both pages in a headless Chromium: they follow a run and talk to a model, and show every text as text."""

import json
import math

import jax.numpy as jnp
import pytest
from flax import nnx

import moe_jax
from moe_jax.serving.engine import Engine
from moe_jax.serving.request import EngineLimits
from moe_jax.train.metrics import MetricsWriter, append_record
from tests.helpers import served, tiny
from tests.helpers.browser import Page, opened
from tests.pages.test_run_server import watched

ATTACK = "</div><img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>"
TAG = "<img src=x>"
LENGTH_OF_LOSS = "charts.get('loss')?.svg.querySelector('path').getAttribute('d').length ?? 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(str(tmp_path_factory.mktemp("profile"))) as browser:
        yield browser


def test_the_page_follows_a_run(browser, tmp_path):
    """It opens before the first step. Then charts, experts, samples and the time left follow, also after a resume."""
    (tmp_path / "settings.json").write_text(json.dumps({"model": ATTACK, "steps": 40}))
    with watched(tmp_path) as server:
        page = Page(browser, server.url)
        assert page.becomes("byId('state').textContent.startsWith('no step yet')")
        writer, drawn = MetricsWriter(tmp_path, resumed_step=0), 0
        for step in range(1, 21):
            load = {"layers": [0, 3], "expert_load": [[step, 0, 10, 10], [10, 10, 10, 10]]}
            writer.write({"step": step, "loss": 4 / step, "step_time": 3.0, "learning_rate": 1e-4}, load)
            if step in (10, 20):
                samples = [{"prompt": ATTACK, "text": f"{ATTACK} {step}", "reward": 0.5}]
                append_record(tmp_path / "samples.jsonl", {"step": step, "samples": samples})
                assert page.becomes(f"{LENGTH_OF_LOSS} > {drawn}")
                drawn = page.run(LENGTH_OF_LOSS)
        assert page.becomes("byId('samples-label').textContent === 'step 20' && byId('load-label').textContent === 'step 20'")
        figures = page.run("byId('figures').textContent")
        assert "20 of 40" in figures and "60 s" in figures
        assert page.run("[byId('heat').width, byId('heat').height]") == [4, 2]
        # The third expert has an even share, the second none.
        assert page.run("[...byId('heat').getContext('2d').getImageData(1, 0, 1, 1).data].slice(0, 3)") == [68, 1, 84]
        page.run("loads.go(0)")
        assert page.becomes("byId('load-label').textContent === 'step 1'")
        page.run("byId('play').click()")
        assert page.becomes("byId('load-label').textContent === 'step 20' && !playing")
        assert ATTACK in page.run("byId('texts').textContent") and ATTACK in page.run("byId('kind').textContent")
        MetricsWriter(tmp_path, resumed_step=5)
        assert page.becomes("records.length === 5 && byId('load-label').textContent === 'step 5'")
        assert page.run("document.title") == tmp_path.name and page.run("document.images.length") == 0 and not page.errors


def test_an_earlier_run_opens_and_the_page_names_what_is_missing(browser, tmp_path):
    append_record(tmp_path / "metrics.jsonl", {"step": 1, "loss": 2.0, "tokens_per_second": 9.0})
    append_record(tmp_path / "metrics.jsonl", {"step": 2, "loss": math.nan})
    with watched(tmp_path) as server:
        page = Page(browser, server.url)
        assert page.becomes("byId('no-load').textContent.startsWith('No load of experts is recorded')")
        assert page.run("byId('no-samples').textContent").startswith("No samples are recorded")
        assert page.run("byId('kind').textContent") == "no settings.json"
        assert page.run("records.map(each => each.loss)") == [2.0, None] and not page.errors


@pytest.fixture
def engine():
    """Compiles what the engine of tests/serving/slow/test_constrained_engine.py compiles."""
    limits = EngineLimits(max_sequences=4, max_tokens_per_step=128, max_chunks_per_step=4, max_length=192, num_pages=16)
    config = moe_jax.Qwen3Config(**tiny.QWEN3 | {"num_hidden_layers": 1})
    model = moe_jax.from_config(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    return Engine(model, limits=limits, tokenizer=tiny.tokenizer(), lazy=True)


def test_a_chat_streams_the_answer_of_a_model(browser, engine):
    """The page asks for the key first. The answer comes in pieces, equal to the API's; numbers of the engine are drawn."""
    question = dict(model="tiny", messages=[{"role": "user", "content": TAG}], max_tokens=20, temperature=0)
    with served.serve(engine, page=True, api_key="secret") as running:
        page = Page(browser, running.url)
        assert page.becomes("!byId('unlock').hidden")
        page.run("byId('key').value = 'secret', byId('unlock').requestSubmit()")
        assert page.becomes("byId('model').value === 'tiny' && points.length > 1")
        page.run(
            "window.pieces = 0, new MutationObserver(() => pieces++).observe(byId('talk'), {childList: true, subtree: true})"
        )
        options = {"text": TAG, "max_tokens": "20", "temperature": "0"}
        page.run("".join(f"byId({json.dumps(name)}).value = {json.dumps(value)};" for name, value in options.items()))
        page.run("byId('ask').requestSubmit()")
        assert page.becomes("byId('speed').textContent.includes('tokens/s')", 60)
        answer = running.openai("secret").chat.completions.create(**question).choices[0].message.content
        assert page.run("document.querySelector('.answer').textContent") == answer and page.run("pieces") > 4
        assert page.run("document.querySelector('.user').textContent") == TAG
        assert page.becomes("byId('figures').textContent.includes('pages in use')") and page.run(
            "speed.svg.innerHTML.length > 100"
        )
        page.run("byId('temperature').value = '-1', byId('text').value = 'again', byId('ask').requestSubmit()")
        assert page.becomes("document.querySelector('#talk .bad')?.textContent.includes('temperature')")
        assert page.run("byId('text').value") == "again", "a question without an answer stays"
        assert page.run("document.title") == "tiny" and page.run("document.images.length") == 0
        assert all("status of 401" in error or "status of 400" in error for error in page.errors)
