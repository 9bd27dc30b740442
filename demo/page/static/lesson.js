// The lesson: each step asks first, then does it, then explains the answer with what was measured.

import { byId, h, refresh, setText } from "./dom.js";
import { count } from "./format.js";
import { post } from "./post.js";

const VISIBLE_LINES = 60;

export class LessonView {
  constructor() {
    this.answers = new Map(); // by step: what this reader has chosen
    this.questions = new Map(); // by step: what was asked
    this.parts = {
      controls: h("div", { class: "controls" }),
      steps: h("ol", { class: "steps", "aria-label": "Steps of the lesson" }),
      now: h("p", { class: "now-title" }),
      card: h("div", { class: "quiz" }),
      status: h("p", { class: "hidden", role: "status" }), // the one line that a screen reader hears
      lines: h("div", { class: "lines", tabindex: "0", role: "region", "aria-label": "What the terminal says" }),
      table: h("div", { class: "verdict", tabindex: "0", role: "region", "aria-label": "Measured so far" }),
    };
    const { controls, steps, now, card, status, lines, table } = this.parts;
    byId("lesson-body").replaceChildren(steps, now, status, card, controls, table, h("details", { open: true }, h("summary", {}, "What the terminal says"), lines));
  }

  render(doc, changed) {
    const lesson = doc.parts.lesson;
    if (!lesson) return;
    if (lesson.run !== this.run) this.begin(lesson.run);
    if (changed.has("lesson") || changed.has("stage")) {
      this.drawSteps(lesson);
      this.drawCard(lesson);
      this.drawControls(lesson, doc.parts.stage);
      this.drawTable(lesson);
    }
    if (changed.has("lines")) this.drawLines(doc.logs.lines ?? []);
  }

  /** Forget what was chosen and asked in another run of the lesson. */
  begin(run) {
    this.run = run;
    this.answers.clear();
    this.questions.clear();
    this.asked = undefined;
  }

  drawSteps(lesson) {
    const state = (index) => (index < lesson.done ? "done" : index === lesson.step && lesson.phase !== "over" ? "now" : "next");
    const words = lesson.steps.map((title) => title.replace(/^\d\. /, ""));
    const name = (title, index) => (state(index) === "done" ? `${title}, done` : title);
    refresh(
      this.parts.steps,
      words.map((title, index) =>
        h("li", { class: state(index), "aria-current": state(index) === "now" ? "step" : null, title: name(title, index) }, h("span", { class: "hidden" }, name(title, index)))),
    );
    setText(this.parts.now, lesson.phase === "over" ? "The lesson is over" : words[lesson.step] ?? "");
  }

  drawCard(lesson) {
    const asked = lesson.question ? { ...lesson.question, step: lesson.step } : this.asked;
    if (asked) this.questions.set(asked.step, asked);
    this.asked = asked;
    const key = JSON.stringify([asked, lesson.answers, this.answers.get(asked?.step), lesson.failed, lesson.phase === "failed"]);
    if (key === this.shownCard) return;
    this.shownCard = key;
    setText(this.parts.status, this.spoken(lesson, asked));
    if (!asked) {
      const starts = lesson.phase === "failed" ? [] : [h("p", { class: "note" }, "The chain is being started.")];
      return this.parts.card.replaceChildren(...starts, ...failure(lesson));
    }
    const focused = [...this.parts.card.querySelectorAll(".option")].indexOf(document.activeElement);
    const chosen = this.answers.get(asked.step);
    const explained = lesson.answers[asked.step];
    this.parts.card.replaceChildren(
      ...(explained ? [] : this.explained(lesson, asked.step - 1)), // the answer stays beside the next question
      h("p", { class: "kicker" }, `Question ${asked.step}`),
      h("h3", {}, asked.text),
      h("div", { class: "options", role: "group", "aria-label": "Your answer" }, asked.options.map((option, index) => this.option(lesson, asked, option, index, chosen, explained))),
      ...(explained ? this.explained(lesson, asked.step) : [h("p", { class: "note" }, chosen === undefined ? "What do you expect?" : "Noted. Now watch.")]),
      ...failure(lesson),
    );
    if (focused >= 0) this.parts.card.querySelectorAll(".option")[focused]?.focus();
  }

  /** What has changed, for those who do not see it. */
  spoken(lesson, asked) {
    if (lesson.failed) return failure(lesson)[0].textContent;
    if (!asked) return "";
    const explained = this.explained(lesson, asked.step);
    return explained.length ? explained[0].textContent : `Question ${asked.step} is asked.`;
  }

  /** The measured answer of a step, if there is one. */
  explained(lesson, step) {
    const answer = lesson.answers[step];
    if (!answer) return [];
    const chosen = this.answers.get(step);
    let verdict = chosen === answer.right ? "You were right. " : "Not quite. ";
    if (chosen === undefined) verdict = "Measured: ";
    if (answer.right === null) verdict = "The measured result matches none of the options: ";
    return [h("p", { class: "answer", "data-step": step }, h("strong", {}, `Question ${step}. ${verdict}`), answer.text)];
  }

  option(lesson, asked, option, index, chosen, explained) {
    const kind = explained && index === explained.right ? "right" : explained && index === chosen ? "wrong" : "";
    return h(
      "button",
      {
        class: `option ${kind}`,
        "aria-pressed": String(chosen === index),
        "aria-disabled": String(Boolean(explained)), // not disabled: the focus stays
        onclick: () => {
          if (explained) return;
          this.answers.set(asked.step, index);
          this.drawCard(lesson);
        },
      },
      option,
      kind === "right" ? h("span", { class: "verdict-mark" }, " ✓ measured") : null,
    );
  }

  drawControls(lesson, stage) {
    const isPlaying = ["playing", "played", "asking", "ready"].includes(lesson.phase);
    const waits = lesson.phase === "asking" && lesson.paused;
    const buttons = isPlaying
      ? [
          waits ? control("step", "Do it", true) : null,
          lesson.paused ? control("resume", "Play on") : control("pause", "Pause before the next step"),
        ]
      : [control("play", "Play the lesson step by step", true, Boolean(stage?.busy))];
    const text = buttons.filter(Boolean).map((one) => one.textContent + one.disabled).join();
    if (text === this.shownControls) return;
    this.shownControls = text;
    const hadFocus = this.parts.controls.contains(document.activeElement);
    this.parts.controls.replaceChildren(...buttons.filter(Boolean));
    if (hadFocus) this.parts.controls.querySelector("button")?.focus();
  }

  drawTable(lesson) {
    const phases = lesson.phases ?? [];
    if (!phases.length) return this.parts.table.replaceChildren();
    const head = ["", "new duplicates on the topic", "skipped by A", "drift of A", "drift of B"];
    this.parts.table.replaceChildren(
      h("table", {},
        h("caption", {}, "Measured so far"),
        h("thead", {}, h("tr", {}, head.map((text) => (text ? h("th", { scope: "col" }, text) : h("td", {}))))),
        h("tbody", {}, phases.map((one) => h("tr", {}, h("th", { scope: "row" }, one.name), ...[one.topic_duplicates, one.skipped, one.drift_right, one.drift_naive].map((value) => h("td", { class: "number" }, count(value === null ? null : Number(value))))))),
      ),
    );
  }

  drawLines(lines) {
    const box = this.parts.lines;
    const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 20;
    box.replaceChildren(
      ...lines.slice(-VISIBLE_LINES).map((line) =>
        line.kind === "expect"
          ? h("p", { class: line.held ? "expect held" : "expect broken" }, `${line.held ? "✔" : "✘"} ${line.text}: `, h("span", {}, line.found))
          : h("p", { class: line.kind }, line.text)),
    );
    if (follows) box.scrollTop = box.scrollHeight;
  }
}

/** What did not hold, or why the lesson has ended. */
function failure(lesson) {
  if (!lesson.failed) return [];
  const title = lesson.phase === "failed" ? "The lesson has ended: " : "An expectation did not hold: ";
  return [h("p", { class: "broken" }, h("strong", {}, title), lesson.failed)];
}

function control(verb, label, isFirst = false, disabled = false) {
  return h("button", { class: isFirst ? "primary" : "", disabled, onclick: () => post("/api/lesson", { verb }) }, label);
}
