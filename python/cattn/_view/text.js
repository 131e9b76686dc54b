// The tokens as text, coloured weight by weight, and the list of the largest weights.

const MOST_CHIPS_WITH_NUMBERS = 48;
const MOST_TOKENS = 1024; // in one lane; with more, the lane follows the window of the heat map
const unique = Math.random().toString(36).slice(2, 8); // several views in a page load this module several times
let lanes = 0;

class Lane {
  constructor({ point }) {
    this.title = make("h3", { id: `cattn-${unique}-${++lanes}` });
    this.text = make("div", { class: "cattn-text", role: "listbox", tabindex: "0", "aria-labelledby": this.title.id });
    this.element = make("section", { class: "cattn-lane" }, this.title, this.text);
    this.point = point;
    const at = (event) => event.target.closest && event.target.closest("[data-at]");
    this.text.addEventListener("pointerover", (event) => at(event) && point(Number(at(event).dataset.at), "hover"));
    this.text.addEventListener("click", (event) => at(event) && point(Number(at(event).dataset.at), "tap"));
    this.text.addEventListener("keydown", (event) => this.press(event));
    this.shown = "";
  }

  // Writes the tokens from..to. name(i) is a token's text; without tokens it is the position.
  build(name, from, to) {
    const few = to - from <= MOST_CHIPS_WITH_NUMBERS;
    const names = Array.from({ length: to - from }, (_, i) => name(from + i));
    const shown = JSON.stringify([from, few, names]);
    if (shown === this.shown) return;
    [this.shown, this.from, this.to, this.few] = [shown, from, to, few];
    this.chips = names.map((text, i) =>
      make("span", { class: "cattn-chip", role: "option", "data-at": from + i, id: `${this.title.id}-${from + i}` },
        make("bdi", {}, text), few ? make("small", { "aria-hidden": "true" }) : null));
    this.text.replaceChildren(...this.chips);
    this.text.classList.toggle("cattn-few", few);
    this.marked = null;
  }

  // Colours token i by value(i), and marks the token `at`.
  paint(value, scale, at, label) {
    this.chips.forEach((chip, i) => {
      const x = value(this.from + i);
      const unknown = x === undefined;
      const level = unknown ? HIDDEN_LEVEL : scale.level(x);
      if (chip.level !== level || chip.scale !== scale) {
        const hidden = level === HIDDEN_LEVEL;
        chip.style.background = hidden ? "" : scale.css[level];
        chip.style.color = hidden ? "" : scale.ink[level];
        [chip.level, chip.scale] = [level, scale];
      }
      if (this.few) setText(chip.lastChild, unknown ? "" : chipText(x));
      if ((this.few || this.from + i === at) && (chip.number !== x || !chip.hasAttribute("aria-label"))) {
        chip.number = x;
        chip.setAttribute("aria-label", `${chip.firstChild.textContent}, ${unknown ? "not known" : label(x)}`);
      }
    });
    const marked = this.chips[at - this.from] || null;
    if (marked !== this.marked) {
      if (this.marked) this.marked.removeAttribute("aria-selected");
      if (marked) marked.setAttribute("aria-selected", "true");
      this.marked = marked;
      this.text.setAttribute("aria-activedescendant", marked ? marked.id : "");
    }
    this.at = at;
  }

  reveal() {
    if (this.marked) scrollInto(this.text, this.marked);
  }

  press(event) {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const ends = { Home: this.from, End: this.to - 1 };
    if ((step === undefined && !(event.key in ends)) || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = step === undefined ? ends[event.key] : this.at + step;
    this.point(Math.min(Math.max(at, this.from), this.to - 1), "key");
    event.preventDefault();
    event.stopPropagation();
  }
}

// The largest numbers of a row or column as a table with bars.
class Largest {
  constructor(title, point) {
    this.body = make("tbody");
    this.caption = make("caption", {}, title);
    this.element = make("table", { class: "cattn-largest" }, this.caption, this.body);
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) point(Number(row.dataset.at), "tap");
    });
  }

  // entries: pairs of position and number, in any order.
  show(entries, name, scale, text, most = 6) {
    const size = ([, x]) => (Number.isNaN(x) ? Infinity : Math.abs(x));
    const best = entries.filter(([, x]) => x !== 0 && x !== -Infinity).sort((a, b) => size(b) - size(a) || a[0] - b[0]);
    const top = best.slice(0, most);
    const full = top.length ? size(top[0]) || 1 : 1;
    this.body.replaceChildren(...top.map((entry) => {
      const [at, x] = entry;
      const part = Number.isFinite(size(entry)) ? Math.min(size(entry) / full, 1) : 1;
      const bar = make("span", { class: "cattn-bar" });
      bar.style.width = `${Math.max(part * 100, 1)}%`;
      bar.style.background = scale.css[scale.level(x)];
      const position = name(at) === String(at) ? "" : String(at);
      return make("tr", { "data-at": at, "data-value": x },
        make("th", { scope: "row" }, make("bdi", {}, name(at))), make("td", { class: "cattn-at" }, position),
        make("td", { class: "cattn-room" }, bar), make("td", { class: "cattn-number" }, text(x)));
    }));
    this.element.hidden = top.length === 0;
  }
}
