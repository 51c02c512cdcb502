"""Eviction orders stated as plainly as possible, to hold the real ones against."""

from typing import Protocol

from penstock.scheduler.hit_density import NUM_BINS

EDGES = [0] + [edge << octave for octave in range(24) for edge in (16, 24)]
"""Where the bins of age begin: 0, 16, 24, 32, 48, ..."""


class NaiveOrder(Protocol):
    """The cached blocks of the default level; `now` counts all blocks that were given back."""

    def blocks(self) -> set[int]: ...

    def arrive(self, blocks: list[int], first_turn: int) -> None: ...

    def insert(self, block: int, turn: int) -> None: ...

    def take(self, block: int) -> int: ...

    def discard(self, block: int, now: int) -> None: ...

    def victim(self, now: int) -> int: ...

    def name(self, table: list[int], chain: list[bytes], first: int, now: int) -> None: ...

    def share(self, block: int) -> None: ...

    def lose(self, block: int) -> None: ...


class NaiveLru:
    """Longest ago first."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}

    def blocks(self) -> set[int]:
        return set(self.turns)

    def arrive(self, blocks: list[int], first_turn: int) -> None:
        self.turns.update({block: first_turn + i for i, block in enumerate(blocks)})

    def insert(self, block: int, turn: int) -> None:
        self.turns[block] = turn

    def take(self, block: int) -> int:
        return self.turns.pop(block)

    def discard(self, block: int, now: int) -> None:
        del self.turns[block]

    def victim(self, now: int) -> int:
        block = min(self.turns, key=self.turns.__getitem__)
        del self.turns[block]
        return block

    def name(self, table: list[int], chain: list[bytes], first: int, now: int) -> None:
        pass

    def share(self, block: int) -> None:
        pass

    def lose(self, block: int) -> None:
        pass


class NaiveHitDensity:
    """`segments`: (class, turn, blocks, tail first); `lives`, `hits`: counts by class, age bin."""

    def __init__(self, num_blocks: int, refit_every: int, max_run: int) -> None:
        self.num_blocks, self.refit_every, self.max_run = num_blocks, refit_every, max_run
        self.segments: list[tuple[int, int, list[int]]] = []
        self.moved: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.marks: dict[int, bytes] = {}
        self.gone: dict[bytes, tuple[int, int]] = {}
        self.lives = [0] * 9
        self.hits = [[0] * NUM_BINS for _ in range(9)]
        self.worth = [[0.0] * NUM_BINS for _ in range(9)]
        self.num_arrivals = 0
        self.choice: tuple[int, int, list[int]] | None = None
        self.num_left = 0

    def blocks(self) -> set[int]:
        return {block for *_, blocks in self.segments for block in blocks} | self.moved.keys()

    def arrive(self, blocks: list[int], first_turn: int) -> None:
        before = None
        for turn, block in enumerate(blocks, first_turn):
            kind = self.uses.get(block, 1)
            if kind != before:
                self.segments.append((kind, turn, []))
            self.segments[-1][2].append(block)
            self.lives[kind] += 1
            before = kind
        self.num_arrivals += 1
        if self.num_arrivals % self.refit_every == 0:
            self.refit()

    def insert(self, block: int, turn: int) -> None:
        self.moved[block] = turn

    def take(self, block: int) -> int:
        if block in self.moved:
            return self.moved.pop(block)
        segment = next(s for s in self.segments if block in s[2])
        segment[2].remove(block)
        self.segments = [s for s in self.segments if s[2]]
        return segment[1]

    def discard(self, block: int, now: int) -> None:
        for kind, turn, blocks in self.segments:
            if block in blocks:
                self.hits[kind][self.bin(now - turn)] += 1
        self.take(block)

    def victim(self, now: int) -> int:
        if self.choice is None or not self.choice[2] or not self.num_left:
            self.choice, self.num_left = self.choose(now), self.max_run
        if self.choice is None:
            block = min(self.moved, key=lambda block: (self.moved[block], block))
        else:
            block = self.choice[2][0]
            self.num_left -= 1
        turn = self.take(block)
        if block in self.marks:
            self.gone[self.marks[block]] = (self.uses.get(block, 1), turn)
            while len(self.gone) > self.num_blocks:
                del self.gone[next(iter(self.gone))]
        self.lose(block)
        return block

    def choose(self, now: int) -> tuple[int, int, list[int]] | None:
        found: list[tuple[float, int, tuple[int, int, list[int]] | None]] = []
        for kind in range(1, 9):
            of_class = [s for s in self.segments if s[0] == kind]
            found += [
                (self.worth[kind][self.bin(now - s[1])], s[1], s)
                for s in (of_class[:1] + of_class[-1:])
            ]
        if self.moved:
            turn, block = min((turn, block) for block, turn in self.moved.items())
            kind = self.uses.get(block, 1)
            found.append((self.worth[kind][self.bin(now - turn)], turn, None))
        return min(found, key=lambda each: each[:2])[2]

    def bin(self, age: int) -> int:
        return max(i for i in range(NUM_BINS) if EDGES[i] <= age)

    def refit(self) -> None:
        for kind in range(9):
            left = [self.lives[kind]]
            for hits in self.hits[kind]:
                left.append(left[-1] - hits)
            left = [max(0, count) for count in left]
            for start in range(NUM_BINS):
                best, gain, cost = 0.0, 0, 0
                for end in range(start, NUM_BINS):
                    gain += self.hits[kind][end]
                    cost += (left[end] + left[end + 1]) * (EDGES[end + 1] - EDGES[end])
                    best = max(best, gain / cost if cost else 0.0)
                self.worth[kind][start] = max(best, self.worth[kind - 1][start] if kind else 0.0)
        if sum(self.lives) > 64 * self.num_blocks:
            self.lives = [count // 2 for count in self.lives]
            self.hits = [[count // 2 for count in hits] for hits in self.hits]

    def name(self, table: list[int], chain: list[bytes], first: int, now: int) -> None:
        """Of chains of up to 8 blocks, which have one mark, their first."""
        new = table[first:]
        if first or not new:
            return
        self.marks[new[0]] = chain[0]
        if chain[0] in self.gone:
            uses, turn = self.gone.pop(chain[0])
            self.hits[uses][self.bin(now - turn)] += len(new)
            for block in new:
                self.uses[block] = min(8, uses + 1)

    def share(self, block: int) -> None:
        self.uses[block] = min(8, self.uses.get(block, 1) + 1)

    def lose(self, block: int) -> None:
        self.uses.pop(block, None)
        self.marks.pop(block, None)
