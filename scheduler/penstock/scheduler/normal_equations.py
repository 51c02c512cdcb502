"""Solves small systems of linear equations, for least squares with few unknowns."""

Row = list[float]

_MIN_PIVOT_SHARE = 1e-12


def solved(matrix: list[Row], right: Row) -> Row | None:
    """x of matrix x = right; None when the matrix is no longer positive definite.

    It is symmetric and should be positive definite, so it needs no pivoting. Plain floats: with
    four unknowns they take a third of the time of numpy's calls.
    """
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for pivot, top in enumerate(rows):
        if not top[pivot] > _MIN_PIVOT_SHARE * matrix[pivot][pivot]:
            return None
        inverse = 1.0 / top[pivot]
        for row in rows[pivot + 1 :]:
            factor = row[pivot] * inverse
            if factor:
                for column in range(pivot + 1, size + 1):
                    row[column] -= factor * top[column]
    solution = [0.0] * size
    for pivot in range(size - 1, -1, -1):
        row = rows[pivot]
        value = row[size]
        for column in range(pivot + 1, size):
            value -= row[column] * solution[column]
        solution[pivot] = value / row[pivot]
    return solution


def projected(information: list[Row], values: Row) -> Row:
    """The point without negative values that fits the observations about as well.

    Negative values become zero and the others take over their share, until none is negative: the
    nearest point in the metric of `information` when one value is negative, close to it otherwise.
    """
    nearest = list(values)
    while min(nearest) < 0.0:
        nearest = [max(value, 0.0) for value in nearest]
        free = [index for index, value in enumerate(nearest) if value > 0.0]
        fixed = [index for index in range(len(values)) if index not in free]
        if not free:
            break
        block = [[information[i][j] for j in free] for i in free]
        right = [sum(information[i][j] * values[j] for j in fixed) for i in free]
        moves = solved(block, right)
        if moves is None:
            break
        for index, move in zip(free, moves, strict=True):
            nearest[index] = values[index] + move
    return nearest
