"""A board of coloured things to press, tick, fill in or close, drawn from a JSON spec.

Usage: python3 -I -S board.py SPEC. It ends when the board is on the screen; the board lives on in the background.
The spec is deleted once read, and no other program may look into the board's memory. What was done is kept in the file spec["state"] as
{"events": [...], "tag": sha256(spec["key"] + JSON of events)}: the key is known to the board and the judge only, so a
state that something else wrote is told apart. Places are pixels of a screen of spec["screen"], [x, y, width, height],
and are scaled to the screen that is there. Standard library only.
"""

# pathlib would cost start-up time
# ruff: noqa: PTH105, PTH108, PTH123
import ctypes
import hashlib
import json
import os
import select
import sys
import time

START_TIMEOUT_S = 20.0
REMAP_S = 2.0
POLL_MS = 150
INK = "#202020"
FONT_PX = 22
HINT_PX = 12


class Model:
    """What is on the board and what was done: everything but the drawing."""

    def __init__(self, spec):
        self.spec = spec
        self.parts = [spec, *spec.get("windows", [])]
        """The board and its open windows, the last one on top."""
        self.events, self.marked, self.ticked, self.texts, self.field = [], set(), set(), {}, None
        self.is_locked = False
        for part in self.parts:
            self.texts.update({thing["id"]: "" for thing in part["things"] if thing["kind"] == "field"})
        self.save()
        self.read_theme()

    def record(self, *event):
        self.events.append(list(event))
        self.save()

    def save(self):
        tag = hashlib.sha256((self.spec["key"] + json.dumps(self.events)).encode()).hexdigest()
        write(self.spec["state"], json.dumps({"events": self.events, "tag": tag}))

    def click(self, x, y):
        """A click at a screen place: it goes to the uppermost part there."""
        for part in reversed(self.parts):
            if part is self.spec or is_in(part["box"], x, y):
                return self.click_part(part, x, y)

    def click_part(self, part, x, y):
        if part is not self.spec:
            self.parts.remove(part)
            self.parts.append(part)
        for thing in reversed(part["things"]):
            if is_in(thing["box"], x, y):
                return self.use(part, thing)

    def use(self, part, thing):
        kind, name = thing["kind"], thing["id"]
        if kind in ("close", "answer"):
            self.parts.remove(part)
            self.record(kind, name)
        elif kind == "swatch":
            write(self.spec["theme"], name + "\n")
            self.read_theme()
        elif self.is_locked:
            return
        elif kind == "press":
            self.marked.add(name)
            self.record(kind, name)
        elif kind == "box":
            self.marked ^= {name}
            self.ticked ^= {name}
        elif kind == "field":
            self.field = name
        elif kind == "done":
            self.marked.add(name)
            self.hand_in()

    def close(self, part):
        """The window manager's own way to close a window; works where the window has something to close it by."""
        for thing in part["things"]:
            if thing["kind"] == "close":
                self.use(part, thing)

    def hand_in(self):
        """Done, ok or enter: once, then nothing changes any more."""
        self.is_locked = True
        self.field = None
        self.record("done", sorted(self.ticked), self.texts)

    def key(self, name, char):
        """A key went down: X name and the character that it types, if any.

        It types where a field was chosen; else it is a hint and acts like a click on what carries its letter, on top.
        """
        if self.field is None:
            part = self.parts[-1]
            for thing in part["things"]:
                if char and thing.get("hint") == char:
                    return self.use(part, thing)
            return
        if name in ("Return", "KP_Enter"):
            self.hand_in()
        elif name == "BackSpace":
            self.texts[self.field] = self.texts[self.field][:-1]
        elif char and char.isprintable():
            self.texts[self.field] += char

    def read_theme(self):
        """Take the theme named in its file, if any; True when that changed the board."""
        name = read(self.spec["theme"]).strip() if "theme" in self.spec else ""
        fill = self.spec.get("themes", {}).get(name, self.spec["fill"])
        is_new = fill != self.spec["fill"]
        self.spec["fill"] = fill
        return is_new


class Surface:
    """A window and its canvas. Things are drawn at their screen place, wherever the window manager puts the window."""

    def __init__(self, view, window, part):
        self.view, self.window, self.part = view, window, part
        self.canvas = view.tk.Canvas(window, highlightthickness=0, background=part["fill"])
        self.canvas.pack(fill="both", expand=True)
        self.canvas.bind("<Configure>", lambda _: self.draw())
        self.canvas.bind("<Button-1>", self.click)

    def draw(self):
        canvas = self.canvas
        canvas.delete("all")
        canvas.configure(background=self.part["fill"])
        for thing in self.part["things"]:
            x, y, w, h = thing["box"]
            draw_thing(
                canvas, thing, x - canvas.winfo_rootx(), y - canvas.winfo_rooty(), w, h, self.view.model
            )

    def click(self, event):
        if self.part is not self.view.model.spec:
            self.window.lift()
        self.view.model.click_part(self.part, event.x_root, event.y_root)
        self.view.refresh()


class View:
    """The windows of a model."""

    def __init__(self, spec):
        import tkinter

        self.tk = tkinter
        self.root = tkinter.Tk(className="Board")
        self.model = model = Model(
            scaled(spec, self.root.winfo_screenwidth(), self.root.winfo_screenheight())
        )
        self.root.tk.call("rename", "send", "")  # else programs can ask Tk what is drawn where
        self.root.title("board")
        self.root.geometry("{}x{}+0+0".format(*model.spec["screen"]))
        self.root.attributes("-zoomed", True)
        self.root.protocol("WM_DELETE_WINDOW", lambda: None)
        self.root.bind_all("<Key>", self.key)
        self.surfaces = [Surface(self, self.root, model.spec)]

    def key(self, event):
        self.model.key(event.keysym, "" if event.state & 4 else event.char)
        self.refresh()

    def refresh(self):
        """Show the model as it is now."""
        for surface in list(self.surfaces):
            if surface.part in self.model.parts:
                surface.draw()
            else:
                self.surfaces.remove(surface)
                surface.window.destroy()

    def watch_theme(self):
        """A program may write the theme's file, too."""
        if self.model.read_theme():
            self.refresh()
        self.root.after(POLL_MS, self.watch_theme)

    def open_window(self, part):
        """A window in front, moved until its inside is at the place that the spec says."""
        x, y, w, h = part["box"]
        window = self.tk.Toplevel(self.root)
        window.title("window")
        window.transient(self.root)
        window.attributes("-type", "dialog")
        window.geometry(f"{w}x{h}+{x}+{y}")
        window.protocol("WM_DELETE_WINDOW", lambda: (self.model.close(part), self.refresh()))
        surface = Surface(self, window, part)
        self.surfaces.append(surface)
        left, top = x, y
        for _ in range(4):
            self.settle(surface)
            dx, dy = x - surface.canvas.winfo_rootx(), y - surface.canvas.winfo_rooty()
            if not dx and not dy:
                return
            left, top = left + dx, top + dy
            window.geometry(f"{w}x{h}+{left}+{top}")
        raise RuntimeError(f"the window manager keeps a window away from its place {part['box']}")

    def settle(self, surface):
        """Wait until the window is visible and has not moved for a few rounds."""
        start = remapped = time.monotonic()
        quiet, last = 0, None
        while quiet < 3:
            self.root.update()
            canvas = surface.canvas
            now = (canvas.winfo_viewable(), canvas.winfo_rootx(), canvas.winfo_rooty(), canvas.winfo_width())
            quiet = quiet + 1 if now == last and now[0] else 0
            last = now
            if time.monotonic() - start > START_TIMEOUT_S:
                raise RuntimeError(
                    f"no window after {START_TIMEOUT_S:.0f} s ({now}): is a window manager running?"
                )
            if not now[0] and time.monotonic() - remapped > REMAP_S:
                surface.window.withdraw()  # a window manager that just starts may miss a window
                surface.window.deiconify()
                remapped = time.monotonic()
            time.sleep(0.008)

    def show(self):
        self.settle(self.surfaces[0])
        for part in self.model.parts[1:]:
            self.open_window(part)
        self.surfaces[-1].window.focus_force()
        self.refresh()
        if "theme" in self.model.spec:
            self.watch_theme()
        self.root.update()
        self.root.winfo_pointerxy()  # a round trip: the server has drawn what was asked


def scaled(spec, width, height):
    """The spec for a screen of this size."""
    across, down = width / spec["screen"][0], height / spec["screen"][1]
    for part in [spec, *spec.get("windows", [])]:
        for boxed in [part, *part["things"]]:
            if "box" in boxed:
                x, y, w, h = boxed["box"]
                left, top = round(x * across), round(y * down)
                boxed["box"] = [left, top, round((x + w) * across) - left, round((y + h) * down) - top]
    scale = min(across, down)
    sizes = {"font_px": round(FONT_PX * scale), "hint_px": round(HINT_PX * scale)}
    return {**spec, "screen": [width, height], **sizes}


def is_in(box, x, y):
    return box[0] <= x < box[0] + box[2] and box[1] <= y < box[1] + box[3]


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


def draw_thing(canvas, thing, x, y, w, h, model):
    """One thing at canvas place x, y."""
    is_marked = thing["id"] in model.marked
    style = {"fill": thing["fill"], "outline": INK, "width": 7 if is_marked else 2}
    if thing.get("shape") == "circle":
        canvas.create_oval(x, y, x + w, y + h, **style)
    else:
        canvas.create_polygon(outline(thing.get("shape"), x, y, w, h), **style)
    kind, font = thing["kind"], ("DejaVu Sans", -model.spec["font_px"], "bold")
    if kind == "box" and is_marked:
        points = [x + w * 0.2, y + h * 0.5, x + w * 0.42, y + h * 0.75, x + w * 0.8, y + h * 0.25]
        canvas.create_line(points, fill=INK, width=9)
    if kind == "close":
        canvas.create_line(x + w * 0.3, y + h * 0.3, x + w * 0.7, y + h * 0.7, fill="#ffffff", width=7)
        canvas.create_line(x + w * 0.7, y + h * 0.3, x + w * 0.3, y + h * 0.7, fill="#ffffff", width=7)
    if kind == "field":
        canvas.create_rectangle(x + 8, y + 8, x + w - 8, y + h - 8, fill="#ffffff", outline=INK)
        text = model.texts[thing["id"]] + ("|" if model.field == thing["id"] else "")
        canvas.create_text(x + 16, y + h / 2, text=text, anchor="w", font=font, fill=INK)
    elif thing.get("text"):
        canvas.create_text(x + w / 2, y + h / 2, text=thing["text"], font=font, fill="#ffffff")
    if thing.get("hint"):
        side, small = model.spec["hint_px"] * 1.3, ("DejaVu Sans", -model.spec["hint_px"])
        canvas.create_rectangle(x, y, x + side, y + side, fill="#ffffff", outline="")
        canvas.create_text(x + side / 2, y + side / 2, text=thing["hint"], font=small, fill=INK)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1000)
    except OSError:
        return ""


def write(path, text):
    """Write the file whole or not at all."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def close_memory():
    """Programs of the same user cannot read this process, nor what it forks (prctl PR_SET_DUMPABLE, number 4)."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def main():
    close_memory()
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
        view = View(spec)
        view.show()
    except Exception as error:
        os.write(told, repr(error).encode())
        return
    os.write(told, b"ready")
    os.close(told)
    view.root.mainloop()


if __name__ == "__main__":
    main()
