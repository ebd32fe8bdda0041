"use strict";
// The user interface of the demo. The state is one object, stored in the URL.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const models = data.models.map(Termwise.load);
  const ORDERS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, "all"];
  const DRAWN = 3;
  const $ = (id) => document.getElementById(id);
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const percent = (x) => (x > 0.9995 && x < 1 ? "> 99.9 %" : x < 0.001 && x > 0 ? "< 0.1 %" : `${(100 * x).toFixed(1)} %`);
  const { words, keys, values, marks } = data.language;
  const vocabulary = data.vocabulary;
  const firstKey = marks + words, firstValue = firstKey + keys;
  const isKey = (id) => id >= firstKey && id < firstValue, isValue = (id) => id >= firstValue;

  // ---- State ----------------------------------------------------------------------------------------------------------------------------

  const state = { text: data.example, order: ORDERS.length - 1, decay: "none", window: "none", write: "plain", variant: "", head: 0, at: -1, read: -1 };
  const KEPT = { text: "s", order: "o", decay: "d", window: "w", write: "r", variant: "v", head: "h", at: "t" };
  const usual = { ...state };

  function fromAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    for (const [key, short] of Object.entries(KEPT)) {
      const value = given.get(short);
      state[key] = value === null ? usual[key] : typeof usual[key] === "number" ? Number(value) | 0 : value;
    }
    state.order = Math.min(Math.max(state.order, 0), ORDERS.length - 1);
    if (!["none", "fixed", "learned"].includes(state.decay)) state.decay = "none";
    if (!["none", "4", "8", "16"].includes(state.window)) state.window = "none";
    if (!["plain", "delta"].includes(state.write)) state.write = "plain";
    state.read = -1;
  }

  function toAddress() {
    const kept = new URLSearchParams();
    for (const [key, short] of Object.entries(KEPT)) if (state[key] !== usual[key]) kept.set(short, state[key]);
    const hash = kept.toString();
    // One history entry for any number of slider movements.
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  // ---- Text and variant -----------------------------------------------------------------------------------------------------------------

  function ids(text) {
    const list = text.trim().split(/\s+/).filter(Boolean).map((word) => {
      const id = vocabulary.findIndex((known, i) => i > 0 && known.toLowerCase() === word.toLowerCase());
      if (id < 0) throw new Error(`The model does not know “${word}”.`);
      return id;
    });
    if (!list.length) throw new Error("Write at least one word.");
    if (list.length + 1 > data.length) throw new Error(`At most ${data.length - 1} words: the model was trained on texts of this length.`);
    return [0, ...list];
  }

  /** The correct answer: the value after the first mention of the last word. */
  function expected(list) {
    const asked = list.at(-1);
    if (!isKey(asked) || list.at(-2) !== 1) return null;
    const stated = list.findIndex((id, i) => id === asked && i + 1 < list.length && isValue(list[i + 1]));
    return stated < 0 ? null : list[stated + 1];
  }

  const named = (name) => models.find((model) => model.name === name);
  /** The model and the variant string of the switches, with these orders. */
  function switched(order) {
    const model = named(state.write === "delta" ? "delta" : state.decay === "learned" ? "decay" : "softmax");
    const kernel = ORDERS[order] === "all" ? "exp" : `taylor=0..${ORDERS[order]}`;
    const rest = model.attention.split(" ").filter((word) => word !== "exp" && word !== "softmax" && !word.startsWith("decay="));
    const words = [kernel, ...rest];
    if (state.window !== "none" && state.write === "plain") words.push(`window=${state.window}`);
    if (state.decay === "fixed") words.push("decay=fixed");
    if (state.decay === "learned" && state.write === "plain") words.push("decay=softplus");
    return { model, text: words.join(" ") };
  }

  /** The model that has the weights for a custom variant string. */
  function typed(text) {
    const variant = Termwise.read(text, data.presets);
    const model = models.find((model) => !Termwise.missing(model, variant) && (!variant.write || model.name === "delta"));
    if (!model) {
      const lack = models.map((model) => Termwise.missing(model, variant)).find(Boolean);
      throw new Error(`No model of this demo has weights for “${lack}”; train one with termwise train.`);
    }
    return { model, text, variant };
  }

  const chosen = () => (state.variant ? typed(state.variant) : switched(state.order));

  // ---- Computing ------------------------------------------------------------------------------------------------------------------------

  const known = new Map();
  function computed(model, text, list) {
    const key = `${model.name}|${text}|${list.join(" ")}`;
    if (!known.has(key)) {
      if (known.size > 200) known.clear();
      const variant = Termwise.read(text, data.presets);
      known.set(key, { variant, ...Termwise.run(model, list, variant) });
    }
    return known.get(key);
  }

  // ---- Showing --------------------------------------------------------------------------------------------------------------------------

  function bars(into, list, cut, right) {
    const row = cut.probabilities.at(-1);
    const best = row.map((p, id) => [p, id]).sort((a, b) => b[0] - a[0]).slice(0, 4);
    if (right !== null && !best.some(([, id]) => id === right)) best[3] = [row[right], right];
    into.replaceChildren(...best.map(([p, id]) => {
      const track = element("span", { class: "track", "aria-hidden": "true" }, element("i"));
      track.firstChild.style.width = `${100 * Math.min(Math.max(p, 0), 1)}%`;
      const name = element("span", { class: id === right ? "right" : "" }, vocabulary[id] + (id === right ? " ✓" : ""));
      return element("div", { class: "bar" }, name, track, element("span", {}, percent(p)));
    }));
  }

  function curve(list, right) {
    const into = $("curve");
    if (right === null || state.variant) return into.replaceChildren();
    const points = ORDERS.map((_, i) => {
      const { model, text } = switched(i);
      return computed(model, text, list).probabilities.at(-1)[right];
    });
    const W = Math.min(Math.max(into.clientWidth, 280), 700), H = 150, left = 44, top = 12, bottom = 30, every = W < 420 ? 2 : 1;
    const x = (i) => left + (W - left - 14) * i / (ORDERS.length - 1), y = (p) => top + (H - top - bottom) * (1 - Math.min(Math.max(p, 0), 1));
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (name, attributes, text) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (text !== undefined) made.textContent = text;
      svg.append(made);
    };
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    svg.setAttribute("role", "img");
    const word = (i) => (ORDERS[i] === "all" ? "all" : `${ORDERS[i]}`);
    svg.setAttribute("aria-label", `Probability of ${vocabulary[right]} by highest order: ${points.map((p, i) => `${word(i)}: ${percent(p)}`).join(", ")}`);
    for (const p of [0, 0.5, 1]) {
      add("line", { class: "grid", x1: left, x2: W - 14, y1: y(p), y2: y(p) });
      add("text", { x: left - 6, y: y(p) + 4, "text-anchor": "end" }, `${100 * p} %`);
    }
    ORDERS.forEach((_, i) => i % every === 0 && add("text", { x: x(i), y: H - 12, "text-anchor": "middle" }, word(i)));
    add("line", { class: "here", x1: x(state.order), x2: x(state.order), y1: top, y2: H - bottom });
    add("polyline", { class: "line", points: points.map((p, i) => `${x(i).toFixed(1)},${y(p).toFixed(1)}`).join(" ") });
    points.forEach((p, i) => add("circle", { class: "dot", cx: x(i), cy: y(p), r: i === state.order ? 5 : 2.5 }));
    into.replaceChildren(element("p", { class: "quiet" }, `Probability of “${vocabulary[right]}” by highest order`), svg);
  }

  function tokens(list, all, cut, at) {
    const row = (from) => from.layers.at(-1)[state.head].weights[at];
    const [a, b] = [row(all), row(cut)];
    const most = Math.max(1e-12, ...a.concat(b).map(Math.abs));
    $("tokens").replaceChildren(...list.map((id, s) => {
      const bar = (w) => {
        const made = element("i", w < 0 ? { class: "negative" } : {});
        made.style.height = `${100 * Math.abs(w) / most}%`;
        return made;
      };
      const said = s > at ? "not yet read" : `${percent(a[s])} with all terms, ${percent(b[s])} chosen`;
      const name = s === 0 ? "start" : vocabulary[id];
      const button = element("button", { type: "button", "aria-pressed": String(s === at), class: s > at ? "later" : "", title: `${name}: ${said}` },
        element("span", { class: "bars", "aria-hidden": "true" }, ...(s > at ? [] : [bar(a[s]), bar(b[s])])),
        element("span", { class: isKey(id) ? "name" : "" }, name), element("span", { class: "hidden" }, `, ${said}`));
      button.addEventListener("click", () => { state.at = s === list.length - 1 ? -1 : s; update(); $("tokens").children[s]?.firstChild.focus(); });
      return element("li", {}, button);
    }));
    const negative = b.some((w) => w < 0);
    $("weights-problem").textContent = negative
      ? "Striped bars are negative: a series that ends with an odd order can be negative, and a write rule subtracts earlier values." : "";
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  /** Rows of numbers as coloured cells: one colour for positive, one for negative, none for zero. */
  function cells(rows, columns, most, label) {
    const canvas = element("canvas", { role: "img", "aria-label": label, width: Math.max(columns, 1), height: Math.max(rows.length, 1) });
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    const [plus, minus] = [channels(colour("--plus")), channels(colour("--minus"))];
    rows.forEach((row, i) => row.forEach((value, j) => {
      const place = 4 * (i * columns + j), share = Math.sqrt(Math.min(Math.abs(value) / (most || 1), 1));
      image.data.set([...(value > 0 ? plus : minus), 255 * share], place);
    }));
    context.putImageData(image, 0, 0);
    canvas.style.width = `${canvas.width * Math.min(Math.max(360 / canvas.width, 3), 14)}px`;
    return canvas;
  }
  const transposed = (rows) => (rows.length ? rows[0].map((_, i) => rows.map((row) => row[i])) : []);
  const largest = (rows) => Math.max(0, ...rows.flat().map(Math.abs));

  function memory(list, cut) {
    const read = state.read < 0 ? list.length - 1 : state.read, { variant } = cut, head = cut.layers.at(-1)[state.head];
    const scoreFn = variant.far ?? variant, d = head.k[0].length, e = head.u[0].length;
    const kernel = scoreFn.kernel, endless = kernel.kind === "exp" || kernel.kind === "taylor" && kernel.at !== 0;
    const keptInWindow = (s) => variant.window !== null && (read - s < variant.window || s < (variant.sinks ?? 0));
    const remembers = (s) => !keptInWindow(s);
    const hasState = variant.window === null || variant.far;
    const orders = { taylor: kernel.orders, power: [kernel.p], feature: [1] }[kernel.kind] ?? Array.from({ length: DRAWN + 1 }, (_, n) => n);
    const parts = [];
    let rows = 0;
    for (const n of hasState ? orders : []) {
      let count = 1;
      for (let i = 0; i < n; i++) count = count * (d + i) / (i + 1);
      rows += count;
      if (n > DRAWN) continue;
      const now = Termwise.memory(head, n, read, remembers), end = Termwise.memory(head, n, list.length - 1, () => true);
      const names = ["the sum of values", "keys × values: linear attention", "pairs of key coordinates × values", "triples × values"];
      parts.push(element("figure", {}, element("figcaption", {}, `Order ${n}: ${names[n]}`),
        cells(transposed(now.matrix), now.terms.length, largest(end.matrix), `Memory of order ${n}: ${now.terms.length} by ${e} numbers, the largest ${largest(now.matrix).toPrecision(2)}`)));
    }
    const further = orders.filter((n) => n > DRAWN).length;
    if (hasState && (further || endless)) parts.push(element("p", { class: "quiet" }, endless ? "… and infinitely many more." : `… and ${further} more: ${Math.round(rows).toLocaleString("en")} rows in all.`));
    $("states").replaceChildren(element("h3", {}, endless ? "Recurrent networks: the first four" : "Recurrent networks"), element("div", { class: "orders" }, ...parts));
    if (!hasState) $("states").replaceChildren(element("h3", {}, "No state: keys that leave the window are dropped"));

    const cached = [];
    for (let s = 0; s <= read; s++) if (variant.window === null || keptInWindow(s)) cached.push([...head.k[s], ...head.v[s]]);
    const scale = largest(head.k.concat(head.v));
    $("cache").replaceChildren(element("h3", {}, `Cache: ${cached.length} keys and values`),
      cells(transposed(cached.concat(Array.from({ length: list.length - cached.length }, () => new Array(2 * d).fill(0)))), list.length, scale,
        `Cache of ${cached.length} of ${list.length} words, ${2 * d} numbers each`));
    const state_ = Math.round(rows) * (e + (variant.over.kind === "sum" ? 1 : 0)), cache = cached.length * 2 * d;
    const number = (n) => n.toLocaleString("en");
    $("memory-text").textContent = !hasState ? `A window keeps at most ${variant.window + (variant.sinks ?? 0)} words: ${number(cache)} numbers now.`
      : endless ? `Softmax has every order, so it has no state of finite size. The cache has ${number(cache)} numbers after ${read + 1} words, ${2 * d} more with each.`
      : `${number(state_)} numbers, for any number of words. A cache has ${number((read + 1) * 2 * d)} now and reaches as many after ${number(Math.ceil(state_ / (2 * d)))} words.`;
    $("position").max = list.length - 1;
    $("position").value = read;
    $("position-text").textContent = `${read + 1} of ${list.length}`;
  }

  function sentence(list, right, all, cut, text) {
    if (right === null) return "End the text with “?” and a name that it has mentioned, to see the probability of the answer.";
    const p = cut.probabilities.at(-1)[right], whole = all.probabilities.at(-1)[right];
    const best = cut.probabilities.at(-1).reduce((best, p, id, row) => (p > row[best] ? id : best), 0);
    const order = ORDERS[state.order];
    const what = state.variant ? `With “${text}”` : order === "all" ? "With all terms" : order === 0 ? "With only order 0, the mean of all values,"
      : order === 1 ? "With orders 0 and 1, which is linear attention," : `With orders 0 to ${order}`;
    const right_ = `the answer “${vocabulary[right]}” has ${percent(p)}`;
    const looks = cut.layers.at(-1).map((head) => head.weights.at(-1)), most = looks.map((row) => Math.max(...row));
    const top = most.indexOf(Math.max(...most)), place = looks[top].indexOf(most[top]), fact = list.findIndex((id, i) => id === right && list[i - 1] === list.at(-1));
    const share = most[top] / looks[top].reduce((sum, w) => sum + Math.abs(w), 0);
    const where = place - fact === 1 ? `, directly after “${vocabulary[list[fact - 1]]} ${vocabulary[right]}”` : place === fact ? ", which is the answer" : "";
    const look = ` Head ${top + 1} has its largest weight, ${percent(share)}, at “${place === 0 ? "start" : vocabulary[list[place]]}”${where}.`;
    const compare = state.variant || order !== "all" ? ` With all terms, as trained, it has ${percent(whole)}.` : "";
    return `${what} ${right_}${best === right ? "" : `; the most probable word is “${vocabulary[best]}”`}.${look}${compare}`;
  }

  function update() {
    let list, own;
    $("sentence-problem").textContent = $("variant-problem").textContent = "";
    try { list = ids(state.text); } catch (error) { $("sentence-problem").textContent = error.message; return; }
    try { own = chosen(); Termwise.read(own.text, data.presets); } catch (error) {
      $("variant-problem").textContent = error.message;
      state.variant = "";
      own = switched(state.order);
    }
    const cut = computed(own.model, own.text, list), all = computed(own.model, own.model.attention, list);
    const right = expected(list);
    state.head = Math.min(Math.max(state.head, 0), own.model.config.heads - 1);
    const at = state.at < 0 || state.at >= list.length ? list.length - 1 : state.at;
    if (state.read >= list.length) state.read = -1;
    const order = ORDERS[state.order];
    $("order").value = state.order;
    const said = state.variant ? "custom" : order === "all" ? "all" : order === 0 ? "order 0" : `orders 0 to ${order}`;
    $("order-text").textContent = said;
    $("order").setAttribute("aria-valuetext", said);
    bars($("answer"), list, cut, right);
    $("seen").textContent = sentence(list, right, all, cut, own.text);
    curve(list, right);
    tokens(list, all, cut, at);
    memory(list, cut);
    for (const group of ["decay", "window", "write"]) for (const input of document.getElementsByName(group)) input.checked = input.value === state[group];
    $("window").closest("fieldset").disabled = state.write === "delta";
    $("decay").querySelector("[value=learned]").disabled = state.write === "delta";
    [...$("heads").children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === state.head)));
    if (document.activeElement !== $("variant")) $("variant").value = own.text;
    if (document.activeElement !== $("sentence")) $("sentence").value = state.text;
    $("trained").textContent = `The weights in use were trained with “${own.model.attention}”. All variants use the same weights without retraining.`;
    document.body.dataset.ready = "yes";
    toAddress();
  }

  // ---- Controls -------------------------------------------------------------------------------------------------------------------------

  function other() {
    const shuffled = (list) => list.map((x) => [Math.random(), x]).sort((a, b) => a[0] - b[0]).map(([, x]) => x);
    const range = (from, count) => Array.from({ length: count }, (_, i) => from + i);
    const names = shuffled(range(firstKey, keys)).slice(0, data.facts), things = shuffled(range(firstValue, values));
    const facts = names.flatMap((name, i) => [name, things[i % things.length]]);
    const asked = names[Math.floor(Math.random() * names.length)];
    return [...facts, 1, asked].map((id) => vocabulary[id]).join(" ");
  }

  $("order").max = ORDERS.length - 1;
  $("order").addEventListener("input", () => { state.order = Number($("order").value); state.variant = ""; update(); });
  $("position").addEventListener("input", () => { state.read = Number($("position").value); update(); });
  $("sentence").addEventListener("input", () => { state.text = $("sentence").value; state.at = -1; update(); });
  $("sentence-form").addEventListener("submit", (event) => event.preventDefault());
  $("another").addEventListener("click", () => { state.text = other(); state.at = state.read = -1; update(); });
  $("variant-form").addEventListener("submit", (event) => { event.preventDefault(); state.variant = $("variant").value.trim(); update(); });
  const choices = {
    decay: [["none", "none"], ["fixed", "fixed"], ["learned", "learned"]],
    window: [["none", "none"], ["4", "4"], ["8", "8"], ["16", "16"]],
    write: [["plain", "add"], ["delta", "delta"]],
  };
  for (const [group, list] of Object.entries(choices)) {
    $(group).append(...list.map(([value, text]) => {
      const input = element("input", { type: "radio", name: group, value });
      input.addEventListener("change", () => {
        state[group] = value;
        if (state.write === "delta" && state.decay === "learned") state.decay = "none";
        state.variant = "";
        update();
      });
      return element("label", {}, input, text);
    }));
  }
  $("heads").append(...Array.from({ length: models[0].config.heads }, (_, i) => {
    const button = element("button", { type: "button" }, `Head ${i + 1}`);
    button.addEventListener("click", () => { state.head = i; update(); });
    return button;
  }));
  let timer = null;
  $("play").addEventListener("click", () => {
    const stop = () => { clearInterval(timer); timer = null; $("play").setAttribute("aria-pressed", "false"); };
    if (timer) return stop();
    state.read = 0;
    $("play").setAttribute("aria-pressed", "true");
    timer = setInterval(() => {
      if (state.read >= ids(state.text).length - 1 || state.read < 0) return stop();
      state.read++;
      update();
    }, matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 350);
    update();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  addEventListener("hashchange", () => { fromAddress(); update(); });
  $("sentence-words").textContent = [["Names", firstKey, keys], ["Animals", firstValue, values], ["Between them", marks, words]]
    .map(([name, from, count]) => `${name}: ${vocabulary.slice(from, from + count).join(", ")}.`).join(" ");
  $("made").textContent = data.made;
  fromAddress();
  update();
})();
