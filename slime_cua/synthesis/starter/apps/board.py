"""A board of coloured things to press, tick, fill in or close, drawn from a JSON spec.

Usage: python3 -I -S board.py SPEC. It ends when the board is on the screen; the board lives on in the background.
The spec is deleted once read. What was done is kept in the file spec["state"] as
{"events": [...], "tag": sha256(spec["key"] + JSON of events)}: the key is known to the board and the judge only, so a
state that something else wrote is told apart. Places are screen pixels: [x, y, width, height]. Standard library only.
"""

# pathlib would cost start-up time
# ruff: noqa: PTH105, PTH108, PTH123
import hashlib
import json
import os
import select
import sys
import time
import tkinter

START_TIMEOUT_S = 20.0
POLL_MS = 150
INK = "#202020"
FONT = ("DejaVu Sans", -22, "bold")


class Surface:
    """A window and its canvas. Things are drawn at their screen place, wherever the window manager puts the window."""

    def __init__(self, board, window, spec):
        self.board, self.window, self.spec = board, window, spec
        self.canvas = tkinter.Canvas(window, highlightthickness=0, background=spec["fill"])
        self.canvas.pack(fill="both", expand=True)
        self.canvas.bind("<Configure>", lambda _: self.draw())
        self.canvas.bind("<Button-1>", self.click)
        self.marked = set()

    def draw(self):
        canvas = self.canvas
        canvas.delete("all")
        canvas.configure(background=self.spec["fill"])
        for thing in self.spec["things"]:
            x, y, w, h = thing["box"]
            draw_thing(canvas, thing, x - canvas.winfo_rootx(), y - canvas.winfo_rooty(), w, h, self)

    def click(self, event):
        self.window.lift()
        for thing in reversed(self.spec["things"]):
            x, y, w, h = thing["box"]
            if x <= event.x_root < x + w and y <= event.y_root < y + h:
                self.board.use(self, thing)
                break
        if self.canvas.winfo_exists():
            self.draw()


def outline(shape, x, y, w, h):
    """Corner points of a polygon in the box."""
    if shape == "triangle":
        return [x + w / 2, y, x + w, y + h, x, y + h]
    if shape == "cross":
        a, b = w / 3, h / 3
        steps = [(a, 0), (2 * a, 0), (2 * a, b), (w, b), (w, 2 * b), (2 * a, 2 * b), (2 * a, h), (a, h)]
        steps += [(a, 2 * b), (0, 2 * b), (0, b), (a, b)]
        return [value for dx, dy in steps for value in (x + dx, y + dy)]
    return [x, y, x + w, y, x + w, y + h, x, y + h]


def draw_thing(canvas, thing, x, y, w, h, surface):
    """One thing at canvas place x, y."""
    is_marked = thing["id"] in surface.marked
    style = {"fill": thing["fill"], "outline": INK, "width": 7 if is_marked else 2}
    if thing.get("shape") == "circle":
        canvas.create_oval(x, y, x + w, y + h, **style)
    else:
        canvas.create_polygon(outline(thing.get("shape"), x, y, w, h), **style)
    kind = thing["kind"]
    if kind == "box" and is_marked:
        points = [x + w * 0.2, y + h * 0.5, x + w * 0.42, y + h * 0.75, x + w * 0.8, y + h * 0.25]
        canvas.create_line(points, fill=INK, width=9)
    if kind == "close":
        canvas.create_line(x + w * 0.3, y + h * 0.3, x + w * 0.7, y + h * 0.7, fill="#ffffff", width=7)
        canvas.create_line(x + w * 0.7, y + h * 0.3, x + w * 0.3, y + h * 0.7, fill="#ffffff", width=7)
    if kind == "field":
        canvas.create_rectangle(x + 8, y + 8, x + w - 8, y + h - 8, fill="#ffffff", outline=INK)
        text = surface.board.texts[thing["id"]] + ("|" if surface.board.field == thing["id"] else "")
        canvas.create_text(x + 16, y + h / 2, text=text, anchor="w", font=FONT, fill=INK)
    elif thing.get("text"):
        canvas.create_text(x + w / 2, y + h / 2, text=thing["text"], font=FONT, fill="#ffffff")


class Board:
    """State of all windows and what the things do."""

    def __init__(self, spec):
        self.spec = spec
        self.events, self.ticked, self.texts, self.field = [], set(), {}, None
        self.is_locked = False
        for part in [spec, *spec.get("windows", [])]:
            self.texts.update({thing["id"]: "" for thing in part["things"] if thing["kind"] == "field"})
        self.root = tkinter.Tk(className="Board")
        self.root.title("board")
        self.root.geometry("{}x{}+0+0".format(*spec["screen"]))
        self.root.attributes("-zoomed", True)
        self.surfaces = [Surface(self, self.root, spec)]
        self.root.bind_all("<Key>", self.key)
        self.root.protocol("WM_DELETE_WINDOW", lambda: None)
        self.save()
        if spec.get("theme"):
            self.apply_theme()

    def record(self, *event):
        self.events.append(list(event))
        self.save()

    def save(self):
        tag = hashlib.sha256((self.spec["key"] + json.dumps(self.events)).encode()).hexdigest()
        write(self.spec["state"], json.dumps({"events": self.events, "tag": tag}))

    def use(self, surface, thing):
        """A click on a thing."""
        kind, name = thing["kind"], thing["id"]
        if kind in ("close", "answer"):
            self.record(kind, name)
            self.surfaces.remove(surface)
            surface.window.destroy()
        elif kind == "swatch":
            write(self.spec["theme"], name + "\n")
            self.apply_theme(once=True)
        elif self.is_locked:
            return
        elif kind == "press":
            surface.marked.add(name)
            self.record(kind, name)
        elif kind == "box":
            surface.marked ^= {name}
            self.ticked ^= {name}
        elif kind == "field":
            self.field = name
        elif kind == "done":
            surface.marked.add(name)
            self.finish()

    def close(self, surface):
        """The window manager's own way to close a window; works where the window has something to close it by."""
        for thing in surface.spec["things"]:
            if thing["kind"] == "close":
                self.use(surface, thing)

    def finish(self):
        """Done or ok: the form is handed in once."""
        self.is_locked = True
        self.field = None
        self.record("done", sorted(self.ticked), self.texts)

    def key(self, event):
        if self.field is None:
            return
        if event.keysym in ("Return", "KP_Enter"):
            self.finish()
        elif event.keysym == "BackSpace":
            self.texts[self.field] = self.texts[self.field][:-1]
        elif event.char.isprintable() and event.char and not event.state & 4:
            self.texts[self.field] += event.char
        for surface in self.surfaces:
            surface.draw()

    def apply_theme(self, once=False):
        """Show the theme named in the file; look again later, a program may write it, too."""
        name = read(self.spec["theme"]).strip()
        fill = self.spec["themes"].get(name)
        if fill and fill != self.spec["fill"]:
            self.spec["fill"] = fill
            self.surfaces[0].draw()
        if not once:
            self.root.after(POLL_MS, self.apply_theme)

    def open_window(self, part):
        """A window in front, moved until its inside is at the place that the spec says."""
        x, y, w, h = part["box"]
        window = tkinter.Toplevel(self.root)
        window.title("window")
        window.transient(self.root)
        window.attributes("-type", "dialog")
        window.geometry(f"{w}x{h}+{x}+{y}")
        surface = Surface(self, window, part)
        window.protocol("WM_DELETE_WINDOW", lambda: self.close(surface))
        self.surfaces.append(surface)
        self.settle(surface)
        left, top = x, y
        for _ in range(3):
            dx, dy = x - surface.canvas.winfo_rootx(), y - surface.canvas.winfo_rooty()
            if not dx and not dy:
                return
            left, top = left + dx, top + dy
            window.geometry(f"{w}x{h}+{left}+{top}")
            self.settle(surface)
        raise RuntimeError(f"the window manager keeps a window away from its place {part['box']}")

    def settle(self, surface):
        """Wait until the window is visible and has not moved for a few rounds."""
        deadline, quiet, last = time.monotonic() + START_TIMEOUT_S, 0, None
        while quiet < 3:
            if time.monotonic() > deadline:
                raise RuntimeError("no window appeared: is a window manager running?")
            self.root.update()
            canvas = surface.canvas
            now = (canvas.winfo_viewable(), canvas.winfo_rootx(), canvas.winfo_rooty(), canvas.winfo_width())
            quiet = quiet + 1 if now == last and now[0] else 0
            last = now
            time.sleep(0.008)

    def show(self):
        self.settle(self.surfaces[0])
        for part in self.spec.get("windows", []):
            self.open_window(part)
        self.surfaces[-1].window.focus_force()
        for surface in self.surfaces:
            surface.draw()
        self.root.update()
        self.root.winfo_pointerxy()  # a round trip: the server has drawn what was asked


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1000)
    except OSError:
        return ""


def write(path, text):
    """Whole or not at all."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        spec = json.load(file)
    os.unlink(sys.argv[1])
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        answer = (
            os.read(ready, 2000) if select.select([ready], [], [], START_TIMEOUT_S + 5)[0] else b"too slow"
        )
        if answer != b"ready":
            sys.exit("board: " + (answer.decode() or "it died at its start"))
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(nothing, handle)
    try:
        board = Board(spec)
        board.show()
    except Exception as error:
        os.write(told, repr(error).encode())
        return
    os.write(told, b"ready")
    os.close(told)
    board.root.mainloop()


if __name__ == "__main__":
    main()
