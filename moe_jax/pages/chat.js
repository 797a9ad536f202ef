const OPTIONS = ["temperature", "top_p", "max_tokens", "seed"], POLL = 1000, MOST_POINTS = 180;

let key = sessionStorage.getItem("key") ?? "", messages = [], stopping = null;

async function ask(path, options = {}) {
  const headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  const answer = await fetch(path, {...options, headers});
  if (answer.status === 401) byId("unlock").hidden = false;
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new Error(body?.error?.message ?? `status ${answer.status}`);
}

// Yields the objects of a stream of server-sent events.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

function say(kind, text = "") {
  const made = element("div", {class: `text ${kind}`}, text);
  byId("talk").append(made);
  return made;
}

async function send() {
  const text = byId("text").value.trim();
  if (!text || stopping) return;
  if (!messages.length) byId("talk").replaceChildren();
  byId("text").value = "";
  messages.push({role: "user", content: text});
  say("user", text);
  const thought = element("details", {hidden: ""}, element("summary", {}, "Thought"), element("div", {class: "text soft"}));
  byId("talk").append(thought);
  const shown = say("answer"), system = byId("system").value.trim();
  const options = OPTIONS.filter(name => byId(name).value !== "").map(name => [name, Number(byId(name).value)]);
  const body = {model: byId("model").value, ...Object.fromEntries(options), stream: true, stream_options: {include_usage: true},
    messages: [...(system ? [{role: "system", content: system}] : []), ...messages]};
  stopping = new AbortController();
  [byId("send").disabled, byId("stop").disabled] = [true, false];
  let first = null, usage = null, content = "";
  try {
    const answer = await ask("/v1/chat/completions", {method: "POST", body: JSON.stringify(body), signal: stopping.signal});
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) {
        thought.hidden = false;
        thought.lastChild.append(delta.reasoning_content);
      }
      if (delta.content || delta.reasoning_content) first ??= performance.now();
      content += delta.content ?? "";
      if (delta.content) shown.append(delta.content);
      byId("talk").scrollTop = byId("talk").scrollHeight;
    }
    const seconds = (performance.now() - first) / 1000, tokens = usage?.completion_tokens;
    byId("speed").textContent = tokens > 1 && first ? `${tokens} tokens, ${short((tokens - 1) / seconds)} tokens/s` : "";
  } catch (error) {
    if (error.name !== "AbortError") say("bad", error.message);
  }
  // A question without an answer is asked again, not sent along with the next one.
  if (content) messages.push({role: "assistant", content});
  else byId("text").value = messages.pop().content;
  stopping = null;
  [byId("send").disabled, byId("stop").disabled] = [false, true];
}

byId("ask").addEventListener("submit", event => {
  event.preventDefault();
  send();
});
byId("text").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => stopping?.abort());
byId("fresh").addEventListener("click", () => {
  stopping?.abort();
  messages = [];
  byId("talk").replaceChildren();
});
byId("unlock").addEventListener("submit", event => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("key", key);
  byId("unlock").hidden = true;
  begin();
});

const speed = new Chart("tokens/s", "seconds"), queue = new Chart("running, waiting in orange", "seconds");
const pages = new Chart("pages in use, cached in orange", "seconds"), points = [];
byId("engine").append(...[speed, queue, pages].map(each => each.node));

function observe(numbers) {
  const now = performance.now() / 1000, {running, waiting, owned_pages, cached_pages, free_pages, tokens_total} = numbers;
  const last = points.at(-1), rate = last ? (tokens_total - last.tokens_total) / (now - last.now) : 0;
  points.push({...numbers, now, rate});
  if (points.length > MOST_POINTS) points.shift();
  const line = (name, kind) => ({points: points.map(each => [each.now, each[name]]), kind});
  speed.draw([line("rate", "")]);
  queue.draw([line("running", ""), line("waiting", "second")]);
  pages.draw([line("owned_pages", ""), line("cached_pages", "second")]);
  const figures = {"tokens/s": short(rate), running, waiting, cached: cached_pages,
    "pages in use": `${owned_pages} of ${owned_pages + cached_pages + free_pages}`};
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) =>
    element("div", {class: "card"}, element("span", {class: "soft"}, name), element("b", {}, `${value}`))));
}

async function begin() {
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    byId("model").replaceChildren(...models.map(each => element("option", {value: each.id}, each.id)));
    byId("state").textContent = document.title = models[0].id;
    byId("state").className = "soft";
  } catch (error) {
    byId("state").textContent = error.message;
    byId("state").className = "bad";
  }
}

async function watch() {
  try {
    if (!document.hidden && byId("unlock").hidden) {
      const found = (await (await ask("/metrics")).text()).matchAll(/^moe_jax_engine_(\w+) (\S+)$/gm);
      observe(Object.fromEntries([...found].map(([, name, value]) => [name, Number(value)])));
    }
  } catch (error) {
    byId("state").textContent = error.message;
  }
  setTimeout(watch, POLL);
}
begin().then(watch);
