// A table whose rows stay the same elements while their facts change: so the focus stays where it is.

import { el, say } from "./dom.js";

const classOf = (column) => (column.isNumber ? "number" : column.name === "actions" ? "actions" : null);

export class Table {
  /**
   * columns: [{name, of(row) -> text, title?, isNumber?, sort?(row) -> what to sort by}], or {name, make(row) -> element}
   * for what is made once per row, with update?(element, row). key(row) names a row.
   */
  constructor(box, { caption, columns, key, empty = "none", isMarked = () => false }) {
    Object.assign(this, { columns, key, empty, isMarked });
    this.rows = [];
    this.byKey = new Map();
    this.sortedBy = null;
    this.isDescending = true;
    this.heads = columns.map((column) => this.head(column));
    this.body = el("tbody");
    const table = el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    box.append(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table));
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
    this.rows = rows;
    const before = this.byKey;
    this.byKey = new Map();
    const elements = this.ordered().map((row) => {
      const name = this.key(row);
      const element = before.get(name) ?? this.makeRow(row);
      this.update(element, row);
      this.byKey.set(name, element);
      return element;
    });
    if (!elements.length) {
      elements.push(el("tr", { class: "none" }, el("td", { colspan: this.columns.length }, this.empty)));
    }
    this.place(elements);
  }

  ordered() {
    if (!this.sortedBy) return this.rows;
    const sign = this.isDescending ? -1 : 1;
    const by = this.sortedBy.sort;
    const compare = (a, b) => (a === b ? 0 : a == null ? 1 : b == null ? -1 : a < b ? -sign : sign);
    return this.rows.toSorted((a, b) => compare(by(a), by(b)));
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
