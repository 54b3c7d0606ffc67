// A table whose rows stay the same elements while their facts change: so the focus stays where it is. Only the rows that
// can be seen, and some beside them, are in the document: 500 are a tenth of a second of layout whenever one changes.

import { el, say } from "./dom.js";

const BESIDE = 8; // rows above and below those that can be seen
const ROW_HEIGHT = 31; // in CSS pixels, until one has been measured

const classOf = (column) => (column.isNumber ? "number" : column.name === "actions" ? "actions" : null);

export class Table {
  /**
   * columns: [{name, of(row) -> text, title?, isNumber?, sort?(row) -> what to sort by}], or {name, make(row) -> element}
   * for what is made once per row, with update?(element, row). key(row) names a row.
   */
  constructor(box, { caption, columns, key, empty = "none", isMarked = () => false }) {
    Object.assign(this, { columns, key, empty, isMarked });
    this.rows = []; // in the order that they are shown in
    this.byKey = new Map();
    this.sortedBy = null;
    this.isDescending = true;
    this.heads = columns.map((column) => this.head(column));
    this.body = el("tbody");
    const table = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.table = table;
    this.above = this.gap();
    this.below = this.gap();
    this.rowHeight = ROW_HEIGHT;
    this.box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    this.top = this.height = 0; // of what can be seen: known without asking for a layout
    this.box.addEventListener("scroll", () => this.moved());
    new ResizeObserver(() => this.moved()).observe(this.box);
    box.append(this.box);
  }

  head(column) {
    const head = el("th", { scope: "col", class: classOf(column), title: column.title });
    if (!column.sort) {
      head.append(column.name);
      return head;
    }
    head.setAttribute("aria-sort", "none");
    head.append(el("button", { class: "sort", onclick: () => this.sortBy(column, head) }, column.name));
    return head;
  }

  sortBy(column, head) {
    this.isDescending = this.sortedBy === column ? !this.isDescending : true;
    this.sortedBy = column;
    for (const each of this.heads) if (each.hasAttribute("aria-sort")) each.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
    this.show(this.rows);
  }

  show(rows) {
    this.rows = this.ordered(rows);
    this.render();
  }

  render() {
    const [first, end] = this.shown();
    const before = this.byKey;
    this.byKey = new Map();
    const elements = this.rows.slice(first, end).map((row) => {
      const name = this.key(row);
      const element = before.get(name) ?? this.makeRow(row);
      this.update(element, row);
      this.byKey.set(name, element);
      return element;
    });
    this.first = first;
    this.end = end;
    if (!elements.length) {
      elements.push(el("tr", { class: "none" }, el("td", { colspan: this.columns.length }, this.empty)));
    }
    this.fill(this.above, first, elements, "unshift");
    this.fill(this.below, this.rows.length - end, elements, "push");
    this.table.setAttribute("aria-rowcount", this.rows.length + 1);
    this.place(elements);
  }

  /** From which row to which: those in the box, some beside them, and the one that has the focus. */
  shown() {
    const all = this.rows.length;
    const atOnce = Math.ceil(this.height / this.rowHeight) + 2 * BESIDE;
    const first = Math.max(0, Math.min(Math.floor(this.top / this.rowHeight) - BESIDE, all - atOnce));
    const end = Math.min(all, first + atOnce);
    const focused = document.activeElement?.closest("tr");
    const at = this.body.contains(focused) ? this.rows.findIndex((row) => this.byKey.get(this.key(row)) === focused) : -1;
    return at < 0 ? [first, end] : [Math.min(first, at), Math.max(end, at + 1)];
  }

  moved() {
    this.top = this.box.scrollTop;
    this.height = this.box.clientHeight;
    const measured = this.byKey.values().next().value?.offsetHeight;
    if (measured) this.rowHeight = measured;
    const [first, end] = this.shown();
    if (first !== this.first || end !== this.end) this.render();
  }

  /** Stands for rows that are not in the document. */
  gap() {
    return el("tr", { class: "gap", "aria-hidden": "true" }, el("td", { colspan: this.columns.length }));
  }

  fill(gap, rows, elements, put) {
    if (!rows) return;
    gap.firstChild.style.height = `${rows * this.rowHeight}px`;
    elements[put](gap);
  }

  ordered(rows) {
    if (!this.sortedBy) return rows;
    const sign = this.isDescending ? -1 : 1;
    const by = this.sortedBy.sort;
    const compare = (a, b) => (a === b ? 0 : a == null ? 1 : b == null ? -1 : a < b ? -sign : sign);
    return rows.toSorted((a, b) => compare(by(a), by(b)));
  }

  makeRow(row) {
    const cells = this.columns.map((column) =>
      el("td", { class: classOf(column) }, column.make ? column.make(row) : null),
    );
    return el("tr", {}, ...cells);
  }

  update(element, row) {
    element.row = row;
    element.classList.toggle("marked", this.isMarked(row));
    this.columns.forEach((column, i) => {
      const cell = element.cells[i];
      if (!column.make) say(cell, column.of(row));
      else column.update?.(cell.firstChild, row);
    });
  }

  /** Put these rows, moving only those that stand elsewhere: an element that is moved loses the focus. */
  place(elements) {
    const kept = new Set(elements);
    for (const child of [...this.body.children]) if (!kept.has(child)) child.remove();
    elements.forEach((element, i) => {
      if (this.body.children[i] !== element) this.body.insertBefore(element, this.body.children[i] ?? null);
    });
  }
}
