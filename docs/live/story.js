// Attention in six steps: each shows one stage, says one sentence, and asks a question that one control answers.

const sizeOf = (x) => signed(x, Math.abs(x) < 0.1 ? 3 : 2);

// What a step can ask of the page: the numbers of the head that is shown, and the names of its words.
class Facts {
  constructor(live) {
    Object.assign(this, { live, view: live.view, head: live.view.chosen[0], q: live.view.at.q });
    this.T = live.source.sizes.T_q;
  }

  row(stage, q = this.q) {
    return Array.from(this.live.row(this.head, stage, q));
  }

  word(i) {
    return `“${this.view.queryName(i)}”`;
  }

  largest(stage, q = this.q) {
    const row = this.row(stage, q);
    const k = row.indexOf(Math.max(...row));
    return [this.word(k), row[k]];
  }

  // The largest difference between the weights of the two ways to mask.
  get difference() {
    const { core, source: { sizes }, layers: [{ arrays, options }] } = this.live;
    const weights = (method) => new Attention(core, sizes, arrays, { ...options, method }).stage("weights");
    const [a, b] = [weights("neg_inf"), weights("renormalize")];
    return a.reduce((most, x, i) => Math.max(most, Math.abs(x - b[i])), 0);
  }
}

// Text and question of a step, its stage and its control; `even`: the weights of its head are not all near 0 or 1; before()
// is what the answer compares with, taken at the start.
const STORY = [
  {
    name: "query and key", stage: "scores", control: "word",
    text: () => "Two matrices that training has found make of each word a query, the numbers that say what it looks for, and a "
      + "key, the numbers that say what it offers. The score of two words is the sum of the products of these numbers.",
    question: "Move to another word that asks. Is its largest score with the same word?",
    before: (now) => [now.word(now.q), ...now.largest("scores")],
    answer: (now, [word, key, x]) => {
      const [other, y] = now.largest("scores");
      const first = `${now.word(now.q)} has its largest score, ${sizeOf(y)}, with ${other}`;
      return other === key ? `${first}, and ${word} had its largest with ${key}, too: try another word.`
        : `No: ${first}; ${word} had its largest, ${sizeOf(x)}, with ${key}. A score belongs to a pair of words.`;
    },
  },
  {
    name: "scale", stage: "scaled", control: "temperature",
    text: (now) => "A longer sum is a larger sum. So each score is divided by the square root of the number of dimensions, "
      + `here √${now.live.source.sizes.D}, and the scores of wide and narrow heads are of one size.`,
    question: "The temperature divides the scores once more. Move it: does another word come first?",
    before: (now) => now.largest("scaled"),
    answer: (now, [key, x]) => {
      const [other, y] = now.largest("scaled");
      const first = other === key ? `No, ${key} stays first` : `Here ${other} comes first`;
      return `${first}: its score was ${sizeOf(x)} and is ${sizeOf(y)}. All scores are divided by one number; they only come `
        + `${Math.abs(y) < Math.abs(x) ? "nearer to" : "farther from"} each other.`;
    },
  },
  {
    name: "mask", stage: "masked", control: "causal",
    text: (now) => "A word must not see the words after it, which it has to guess: their scores become −∞. Or take the softmax of all "
      + "scores, put 0 for later words, and divide each row by its sum: here the weights of the two ways differ by at most "
      + `${now.difference.toExponential(0)}, which is rounding.`,
    question: "Take the tick from “causal”. Which word’s numbers do not change? Why?",
    before: (now) => Array.from({ length: now.T }, (_, q) => now.row("masked", q).join()),
    answer: (now, rows) => {
      const same = rows.map((row, q) => (row === now.row("masked", q).join() ? q : -1)).filter((q) => q >= 0);
      return `${same.map((q) => `${now.word(q)} (${q})`).join(", ")}: no word stands after the last one, so nothing was hidden from it.`;
    },
  },
  {
    name: "softmax", stage: "weights", control: "temperature", even: true,
    text: () => "The softmax makes weights of scores: e to the power of each score, divided by the sum of its row. So weights are "
      + "between 0 and 1, the weights of a word sum to 1, and e^−∞ is 0.",
    question: "Move the temperature to 0.1, and then to 4. What happens to the largest weight?",
    before: (now) => now.largest("weights"),
    answer: (now, [key, x]) => {
      const [other, y] = now.largest("weights");
      return `It was ${sizeOf(x)}, of ${key}, and is ${sizeOf(y)}, of ${other}. `
        + (y > x ? "Cold: the largest score takes more, and at last everything." : "Hot: the words get more similar shares.");
    },
  },
  {
    name: "dropout", stage: "dropped", control: "dropout", even: true,
    text: () => "In training, dropout sets some weights to 0 by chance, so that a model does not rely on a single word. The others "
      + "are divided by the share that is kept, so that a row still sums to 1 on average.",
    question: "Move dropout to 0.5. What happens to a weight that is kept?",
    before: () => null,
    answer: (now) => {
      const p = now.live.options.dropout;
      const queries = Array.from({ length: now.T }, (_, q) => [now.row("weights", q), now.row("dropped", q)]);
      const pairs = queries.flatMap(([before, after]) => before.map((x, k) => [x, after[k]])).filter(([x]) => x > 0);
      const kept = pairs.filter(([, y]) => y > 0);
      const [x, y] = kept.reduce((a, b) => (b[0] > a[0] ? b : a), [0, 0]);
      return `${pairs.length - kept.length} of ${pairs.length} weights are 0 now. Each of the others is divided by 1 − ${p}: `
        + `the largest was ${sizeOf(x)} and is ${sizeOf(y)}.`;
    },
  },
  {
    name: "output", stage: "output", control: "window",
    text: () => "A third matrix makes a value of each word: the numbers that it hands on. The output of a word is the sum of all values, each times its weight. "
      + "So the words that it looks at become a part of it.",
    question: "Move the window to 1 token, so that a word sees only itself. What is its output then?",
    before: () => null,
    answer: (now) => {
      const { live: { layers: [{ arrays }], source: { sizes: { D_v } } }, T, head: [, head] } = now;
      const same = now.row("output").every((x, d) => x === arrays.value[(head * T + now.q) * D_v + d]);
      return same ? "Its own value, number for number: the only weight is 1." : `A mixture of up to ${now.live.options.window || T} values: go down to 1 token.`;
    },
  },
];

class Story {
  constructor(live) {
    this.live = live;
    const range = make("input", { type: "range", name: "word", min: 0, step: 1, oninput: () => this.ask() });
    this.word = control("word", range, (input) => new Facts(live).word(Number(input.value)));
    this.links = STORY.map(({ name }, i) => {
      const href = `#step=${i + 1}`;
      return make("a", { href, onclick: () => location.hash === href && this.tell(i + 1) }, `${i + 1} ${name}`);
    });
    this.text = make("p");
    this.question = make("p");
    this.answer = make("output", { "aria-live": "polite" });
    this.end = make("button", { type: "button", hidden: true, onclick: () => this.leave() }, "End the story");
    this.panel = make("div", { class: "cattn-step", hidden: true }, this.text, this.question, this.answer);
    this.element = make("nav", { class: "cattn-story", "aria-label": "attention in six steps" },
      make("span", {}, "In six steps: ", ...this.links, this.end), this.panel);
  }

  get controls() {
    return { ...this.live.controls, word: this.word };
  }

  // Shows a step, or none.
  tell(number) {
    const step = STORY[number - 1];
    if (this.place) this.place.replaceWith(this.controls[this.step.control].label); // back to its group
    [this.step, this.place, this.start] = [step, null, null];
    this.links.forEach((link, i) => (i === number - 1 ? link.setAttribute("aria-current", "step") : link.removeAttribute("aria-current")));
    this.panel.hidden = this.end.hidden = !step;
    this.live.root.classList.toggle("cattn-telling", Boolean(step));
    if (!step) return;
    const { live } = this;
    live.restore();
    live.stage = step.stage;
    live.update();
    const heads = Array.from({ length: live.source.sizes.heads }, (_, head) => [0, head]);
    live.look(...live.opening(heads.find((head) => Boolean(live.nameOf(head)) !== Boolean(step.even)) || heads[0]));
    const now = new Facts(live);
    Object.assign(this.word.input, { max: now.T - 1, value: now.q });
    this.word.show();
    setText(this.text, step.text(now));
    const { label } = this.controls[step.control];
    this.place = document.createComment(step.control);
    if (label.parentElement) label.replaceWith(this.place);
    this.question.replaceChildren(make("b", {}, step.question), " ", label);
    setText(this.answer, "");
    this.start = { value: this.value, text: live.source.text, before: step.before(now) };
  }

  get value() {
    const { input } = this.controls[this.step.control];
    return input.type === "checkbox" ? String(input.checked) : input.value;
  }

  // The word that asks has been moved.
  ask() {
    const q = Number(this.word.input.value);
    const row = new Facts(this.live).row("scores", q);
    this.live.view.point(q, row.indexOf(Math.max(...row)), "key");
    this.word.show();
    this.show();
  }

  // Says the answer as soon as the control has another value than at the start.
  show() {
    if (!this.start || this.live.stage !== this.step.stage) return;
    if (this.live.source.text !== this.start.text) this.tell(STORY.indexOf(this.step) + 1); // another sentence
    else setText(this.answer, this.value === this.start.value ? "" : this.step.answer(new Facts(this.live), this.start.before));
  }

  leave() {
    history.replaceState(null, "", location.href.split("#")[0]);
    const link = this.links[STORY.indexOf(this.step)];
    this.tell(0);
    this.live.restore();
    link.focus();
  }
}
