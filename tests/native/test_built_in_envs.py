"""The rules of the built-in games GridWorld, Bricks and Tag. States are set and read as raw bytes, in the layout of the
C structs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memlane.native import NativeVectorEnv, make

GAMES = ["GridWorld-v0", "Bricks-v0", "Tag-v0"]
STATES = {
    "GridWorld-v0": np.dtype([("agent", "i4", 2), ("target", "i4", 2)]),
    "Bricks-v0": np.dtype(
        [("bricks", "u8"), ("paddle", "i4"), ("x", "i4"), ("y", "i4"), ("dx", "i4"), ("dy", "i4")], align=True
    ),
    "Tag-v0": np.dtype([("x", "f4", 4), ("y", "f4", 4), ("it", "i4")]),
}


def state_of(envs: NativeVectorEnv) -> NDArray[Any]:
    """One writable record per environment."""
    return envs.state.view(STATES[envs.native_spec.name])


def begun(name: str, num_envs: int = 1, seed: int = 1, **kwargs: Any) -> NativeVectorEnv:
    envs = make(name, num_envs=num_envs, copy=True, **kwargs)
    envs.reset(seed=seed)
    return envs


def played(name: str, steps: int, seed: int, **kwargs: Any) -> list[Any]:
    """All results of a run with random actions."""
    envs = make(name, num_envs=130, copy=True, **kwargs)
    rng = np.random.default_rng(5)
    shown: list[Any] = [envs.reset(seed=seed)]
    choices = envs.single_action_space.n  # type: ignore[attr-defined]
    shown += [envs.step(rng.integers(choices, size=envs.num_envs)) for _ in range(steps)]
    envs.close()
    return shown


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(found, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_array_equal(found, expected)


# ---------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", GAMES)
def test_a_run_depends_on_its_seed_alone(name: str) -> None:
    assert_same(played(name, 60, seed=4), played(name, 60, seed=4))


@pytest.mark.parametrize("name", GAMES)
def test_a_run_does_not_depend_on_the_number_of_threads(name: str) -> None:
    assert_same(played(name, 60, seed=4, num_threads=1), played(name, 60, seed=4, num_threads=3))


@pytest.mark.parametrize("name", GAMES)
def test_another_seed_makes_another_run(name: str) -> None:
    with pytest.raises(AssertionError):
        assert_same(played(name, 0, seed=4), played(name, 0, seed=1_000))


@pytest.mark.parametrize("name", GAMES)
def test_observations_stay_within_their_space(name: str) -> None:
    envs = begun(name, 40)
    envs.action_space.seed(3)
    for step in range(400):
        observations = envs.step(envs.action_space.sample())[0]
        assert observations in envs.observation_space, f"step {step}"
    envs.close()


@pytest.mark.parametrize("name", GAMES)
def test_rewards_stay_within_the_declared_range(name: str) -> None:
    envs = begun(name, 40)
    envs.action_space.seed(3)
    low, high = {"GridWorld-v0": (-1, 1), "Bricks-v0": (0, 2), "Tag-v0": (-1, 3)}[name]
    for step in range(400):
        rewards = envs.step(envs.action_space.sample())[1]
        assert rewards.min() >= low, f"step {step}"
        assert rewards.max() <= high, f"step {step}"
    envs.close()


@pytest.mark.parametrize("name", GAMES)
def test_the_picture_has_several_colours(name: str) -> None:
    envs = begun(name, 2, render_mode="rgb_array")
    picture = envs.render(1)
    assert picture is not None
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) >= 3
    envs.close()


@pytest.mark.parametrize("name", GAMES)
def test_the_picture_changes_with_the_game(name: str) -> None:
    envs = begun(name, 2, render_mode="rgb_array")
    before = envs.render(1)
    for action in (1, 2, 1):
        envs.step(np.full(envs.num_envs, action))
    assert np.any(before != envs.render(1))
    envs.close()


# ------------------------------------------------------------------------------------------------------------ GridWorld

RIGHT, UP, LEFT, DOWN = range(4)
WAYS = {RIGHT: (1, 0), UP: (0, -1), LEFT: (-1, 0), DOWN: (0, 1)}
Cell = tuple[int, int]


@pytest.fixture(scope="module")
def moves() -> dict[tuple[Cell, int], tuple[Cell, float, bool]]:
    """The effect of every action in every cell, with the target far away: next cell, reward, whether it terminates."""
    tried = [((x, y), action) for x in range(8) for y in range(8) for action in range(4)]
    envs = begun("GridWorld-v0", len(tried))
    state = state_of(envs)
    for env, ((x, y), _) in enumerate(tried):
        state[env] = ((x, y), ((x + 4) % 8, (y + 4) % 8))
    observations, rewards, terminated, _, _ = envs.step(np.array([action for _, action in tried]))
    envs.close()
    return {
        move: (tuple(observations["agent"][env].tolist()), float(rewards[env]), bool(terminated[env]))
        for env, move in enumerate(tried)
    }


def free_cells(moves: dict[tuple[Cell, int], tuple[Cell, float, bool]]) -> set[Cell]:
    """Cells that can be entered and are not lava."""
    return {to for (at, _), (to, _, ended) in moves.items() if to != at and not ended}


def test_in_a_grid_world_an_action_leads_to_the_next_cell_or_nowhere(moves: Any) -> None:
    for (at, action), (to, _, _) in moves.items():
        assert to in (at, (at[0] + WAYS[action][0], at[1] + WAYS[action][1]))


def test_in_a_grid_world_nobody_leaves_the_grid(moves: Any) -> None:
    assert {to for to, _, _ in moves.values()} <= {(x, y) for x in range(8) for y in range(8)}


def test_in_a_grid_world_there_are_walls_that_nobody_enters(moves: Any) -> None:
    entered = {to for (at, _), (to, _, _) in moves.items() if to != at}
    assert 0 < 64 - len(entered) < 20


def test_in_a_grid_world_lava_costs_one_and_ends_the_episode(moves: Any) -> None:
    ends = [reward for (at, _), (to, reward, ended) in moves.items() if ended and to != at]
    assert ends
    assert set(ends) == {-1.0}


def test_in_a_grid_world_every_other_step_costs_a_little(moves: Any) -> None:
    assert {reward for _, reward, ended in moves.values() if not ended} == {-0.01}


def test_in_a_grid_world_agent_and_target_begin_on_free_cells_of_their_own(moves: Any) -> None:
    envs = begun("GridWorld-v0", 3000)
    free = free_cells(moves)
    for agent, target in state_of(envs).tolist():
        assert tuple(agent) in free
        assert tuple(target) in free
        assert tuple(agent) != tuple(target)
    envs.close()


def test_in_a_grid_world_every_free_cell_can_be_a_start_and_a_target(moves: Any) -> None:
    envs = begun("GridWorld-v0", 3000)
    for field in ("agent", "target"):
        assert {tuple(cell) for cell in state_of(envs)[field].tolist()} == free_cells(moves)
    envs.close()


def test_in_a_grid_world_there_is_a_way_from_every_start_to_every_target(moves: Any) -> None:
    free = free_cells(moves)
    for start in free:
        reached, edge = {start}, [start]
        while edge:
            at = edge.pop()
            ways = {to for action in range(4) for to, _, ended in [moves[at, action]] if not ended}
            edge += ways - reached
            reached |= ways
        assert reached == free, f"from {start}"


@pytest.fixture
def beside_the_target() -> Iterator[NativeVectorEnv]:
    envs = begun("GridWorld-v0")
    state_of(envs)[0] = ((3, 7), (4, 7))
    yield envs
    envs.close()


def test_in_a_grid_world_the_target_is_worth_one_and_ends_the_episode(beside_the_target: NativeVectorEnv) -> None:
    _, rewards, terminated, truncated, _ = beside_the_target.step([RIGHT])
    assert (rewards[0], terminated[0], truncated[0]) == (1.0, True, False)


def test_in_a_grid_world_both_fields_tell_where_things_are(beside_the_target: NativeVectorEnv) -> None:
    observations = beside_the_target.step([LEFT])[0]
    assert {name: cell.tolist() for name, cell in observations.items()} == {"agent": [[2, 7]], "target": [[4, 7]]}


def test_in_a_grid_world_the_distance_is_told_after_a_step(beside_the_target: NativeVectorEnv) -> None:
    assert beside_the_target.step([LEFT])[4]["distance"].tolist() == [2]


def test_in_a_grid_world_the_distance_is_told_after_a_reset() -> None:
    envs = make("GridWorld-v0", num_envs=50)
    observations, infos = envs.reset(seed=1)
    np.testing.assert_array_equal(infos["distance"], np.abs(observations["agent"] - observations["target"]).sum(axis=1))
    envs.close()


def test_in_a_grid_world_an_episode_is_cut_off_after_a_hundred_steps() -> None:
    envs = begun("GridWorld-v0")
    state_of(envs)[0] = ((0, 0), (7, 7))
    ends = [envs.step([LEFT])[3][0] for _ in range(100)]
    assert ends == [False] * 99 + [True]
    envs.close()


# --------------------------------------------------------------------------------------------------------------- Bricks

STAY, TO_LEFT, TO_RIGHT = range(3)
ALL_BRICKS = (1 << 60) - 1


def set_ball(envs: NativeVectorEnv, **numbers: int) -> None:
    for name, number in numbers.items():
        state_of(envs)[name] = number


@pytest.fixture
def bricks() -> Iterator[NativeVectorEnv]:
    envs = begun("Bricks-v0")
    yield envs
    envs.close()


def test_bricks_begins_with_all_bricks_and_a_ball_that_falls(bricks: NativeVectorEnv) -> None:
    state = state_of(bricks)[0]
    assert (int(state["bricks"]), int(state["dy"])) == (ALL_BRICKS, 3)


def test_the_ball_moves_by_its_speed(bricks: NativeVectorEnv) -> None:
    set_ball(bricks, x=40, y=50, dx=-1, dy=3)
    bricks.step([STAY])
    assert [int(state_of(bricks)[name][0]) for name in ("x", "y")] == [39, 53]


@pytest.mark.parametrize(("x", "dx"), [(2, -1), (3, -2), (80, 1), (79, 2)])
def test_the_ball_bounces_off_the_walls_at_its_sides(bricks: NativeVectorEnv, x: int, dx: int) -> None:
    set_ball(bricks, x=x, y=50, dx=dx, dy=3)
    bricks.step([STAY])
    assert int(state_of(bricks)["dx"][0]) == -dx


def test_the_ball_bounces_off_the_wall_above(bricks: NativeVectorEnv) -> None:
    set_ball(bricks, x=40, y=6, dx=1, dy=-3, bricks=1)
    bricks.step([STAY])
    assert int(state_of(bricks)["dy"][0]) == 3


def test_the_ball_bounces_off_the_paddle(bricks: NativeVectorEnv) -> None:
    set_ball(bricks, x=40, y=77, dx=1, dy=3)
    _, _, terminated, _, _ = bricks.step([STAY])
    assert (int(state_of(bricks)["dy"][0]), terminated[0]) == (-3, False)


def test_where_the_ball_meets_the_paddle_decides_where_it_goes() -> None:
    envs = begun("Bricks-v0", 16)
    set_ball(envs, y=77, dx=1, dy=3, paddle=34)
    state_of(envs)["x"] = 34 + np.arange(16) - 2
    envs.step(np.zeros(16, np.int64))
    ways = state_of(envs)["dx"].tolist()
    assert ways == sorted(ways)
    assert set(ways) == {-2, -1, 1, 2}
    envs.close()


@pytest.mark.parametrize("x", [5, 30, 52, 75])
def test_a_ball_beside_the_paddle_is_lost(bricks: NativeVectorEnv, x: int) -> None:
    set_ball(bricks, x=x, y=77, dx=1, dy=3, paddle=34)
    assert bricks.step([STAY])[2][0]


def test_actions_move_the_paddle() -> None:
    envs = begun("Bricks-v0", 3)
    envs.step([STAY, TO_LEFT, TO_RIGHT])
    assert state_of(envs)["paddle"].tolist() == [34, 31, 37]
    envs.close()


@pytest.mark.parametrize(("action", "end"), [(TO_LEFT, 2), (TO_RIGHT, 66)])
def test_the_paddle_stops_at_the_walls(bricks: NativeVectorEnv, action: int, end: int) -> None:
    for _ in range(30):
        set_ball(bricks, x=40, y=50, dx=1, dy=3)
        bricks.step([action])
    assert int(state_of(bricks)["paddle"][0]) == end


@pytest.fixture
def below_a_brick(bricks: NativeVectorEnv) -> NativeVectorEnv:
    """The ball is about to hit the third brick of the lowest row from below."""
    set_ball(bricks, x=20, y=39, dx=1, dy=-3)
    return bricks


def test_a_brick_is_worth_one(below_a_brick: NativeVectorEnv) -> None:
    assert below_a_brick.step([STAY])[1][0] == 1


def test_a_brick_that_was_hit_is_gone(below_a_brick: NativeVectorEnv) -> None:
    below_a_brick.step([STAY])
    assert int(state_of(below_a_brick)["bricks"][0]) == ALL_BRICKS & ~(1 << 52)


def test_a_brick_that_was_hit_is_gone_from_the_frame(below_a_brick: NativeVectorEnv) -> None:
    frame = below_a_brick.step([STAY])[0][0]
    assert not frame[34:36, 18:25].any()  # below is the ball's trail
    assert frame[34:36, 26:33].all()  # its neighbour


def test_the_ball_bounces_off_a_brick(below_a_brick: NativeVectorEnv) -> None:
    below_a_brick.step([STAY])
    assert int(state_of(below_a_brick)["dy"][0]) == 3


def test_the_ball_bounces_off_the_side_of_a_brick(bricks: NativeVectorEnv) -> None:
    only = 1 << 52  # pixels 18 to 25
    set_ball(bricks, x=15, y=35, dx=2, dy=-3, bricks=only)
    rewards = bricks.step([STAY])[1]
    assert (int(state_of(bricks)["dx"][0]), rewards[0]) == (-2, 1)


def test_the_last_brick_ends_the_game(below_a_brick: NativeVectorEnv) -> None:
    set_ball(below_a_brick, bricks=1 << 52)
    _, rewards, terminated, _, _ = below_a_brick.step([STAY])
    assert (rewards[0], terminated[0]) == (1, True)


def follow(envs: NativeVectorEnv, rng: np.random.Generator) -> NDArray[np.int64]:
    """Keeps a varying part of the paddle below the ball."""
    state = state_of(envs)
    ahead = state["x"] + 1 - (state["paddle"] + rng.integers(3, 14, len(state)))
    return np.where(ahead < -2, TO_LEFT, np.where(ahead > 2, TO_RIGHT, STAY)).astype(np.int64)


@pytest.fixture(scope="module")
def long_games() -> list[tuple[NDArray[Any], ...]]:
    """Frames, states, rewards and ends of two thousand steps of players that follow the ball."""
    envs = begun("Bricks-v0", 8)
    rng = np.random.default_rng(1)
    steps = []
    for _ in range(2100):
        frames, rewards, terminated, truncated, _ = envs.step(follow(envs, rng))
        steps.append((frames, state_of(envs).copy(), rewards, terminated, truncated))
    envs.close()
    return steps


def test_one_frame_tells_the_whole_state_of_bricks(long_games: Any) -> None:
    seen: dict[bytes, bytes] = {}
    names = list(STATES["Bricks-v0"].names or ())
    for frames, states, *_ in long_games:
        for frame, state in zip(frames, states, strict=True):
            numbers = repr([int(state[name]) for name in names]).encode()
            assert seen.setdefault(frame.tobytes(), numbers) == numbers


def test_who_follows_the_ball_breaks_most_bricks(long_games: Any) -> None:
    left = [int(state["bricks"]).bit_count() for _, states, *_ in long_games for state in states]
    assert min(left) < 15


def test_rewards_of_a_game_are_the_bricks_that_are_gone(long_games: Any) -> None:
    broken = np.zeros(8)
    ended = np.zeros(8, bool)
    for _, states, rewards, terminated, truncated in long_games:
        broken = np.where(ended, 0, broken + rewards)  # the step after the end is a reset
        ended = terminated | truncated
        assert broken.tolist() == [60 - int(bits).bit_count() for bits in states["bricks"]]


def test_the_ball_stays_in_the_picture(long_games: Any) -> None:
    for _, states, *_ in long_games:
        assert states["x"].min() >= 2
        assert states["x"].max() <= 80
        assert states["y"].min() >= 4
        assert states["y"].max() <= 82


# ------------------------------------------------------------------------------------------------------------------ Tag


@pytest.fixture
def tag() -> Iterator[NativeVectorEnv]:
    """One game with agent 1 as "it" in the centre; the others are far away on its right, on its left and below."""
    envs = begun("Tag-v0")
    place(envs, it=1, x=[0.8, 0, -0.8, 0], y=[0, 0, 0, 0.8])
    yield envs
    envs.close()


def place(envs: NativeVectorEnv, **numbers: Any) -> None:
    for name, value in numbers.items():
        state_of(envs)[name] = value


def test_tag_begins_with_all_agents_in_the_game() -> None:
    envs = make("Tag-v0", num_envs=100)
    assert envs.reset(seed=1)[1]["alive"].all()
    envs.close()


def test_tag_has_one_who_is_it_and_it_may_be_anyone() -> None:
    envs = make("Tag-v0", num_envs=200)
    is_it = envs.reset(seed=1)[0][:, 2].reshape(200, 4)
    assert np.all(is_it.sum(axis=1) == 1)
    assert is_it.any(axis=0).all()
    envs.close()


def test_in_tag_runners_have_a_head_start() -> None:
    envs = begun("Tag-v0", 300)
    state = state_of(envs)
    from_the_middle = np.sort(np.hypot(state["x"], state["y"]), axis=1)
    assert np.all(from_the_middle[:, 0] == 0)
    assert np.all(from_the_middle[:, 1] >= 0.5)
    envs.close()


@pytest.mark.parametrize(("action", "way"), [(0, (0, 0)), (1, (1, 0)), (2, (0, -1)), (3, (-1, 0)), (4, (0, 1))])
def test_in_tag_runners_run_and_it_is_faster(tag: NativeVectorEnv, action: int, way: tuple[int, int]) -> None:
    before = state_of(tag).copy()[0]
    tag.step(np.full(4, action))
    after = state_of(tag)[0]
    speeds = np.array([0.05, 0.06, 0.05, 0.05])
    np.testing.assert_allclose(after["x"] - before["x"], way[0] * speeds, atol=1e-6)
    np.testing.assert_allclose(after["y"] - before["y"], way[1] * speeds, atol=1e-6)


def test_in_tag_nobody_leaves_the_square(tag: NativeVectorEnv) -> None:
    for _ in range(30):
        tag.step(np.full(4, 1))
    assert state_of(tag)["x"].max() == 1


def test_in_tag_runners_gain_a_little_by_running(tag: NativeVectorEnv) -> None:
    assert tag.step(np.zeros(4, np.int64))[1].tolist() == [0.01, 0, 0.01, 0.01]


@pytest.fixture
def touching(tag: NativeVectorEnv) -> NativeVectorEnv:
    """Agent 2 is within reach of agent 1, which is "it"."""
    place(tag, x=[0.8, 0, 0.1, 0])
    return tag


def test_in_tag_a_touch_is_worth_one_to_it_and_costs_the_runner_one(touching: NativeVectorEnv) -> None:
    assert touching.step(np.zeros(4, np.int64))[1].tolist() == [0.01, 1, -1, 0.01]


def test_in_tag_who_is_touched_is_out_at_once(touching: NativeVectorEnv) -> None:
    _, _, terminated, _, infos = touching.step(np.zeros(4, np.int64))
    assert terminated.tolist() == [False, False, True, False]
    assert infos["alive"].tolist() == [True, True, False, True]


def test_in_tag_others_no_longer_see_who_was_touched(touching: NativeVectorEnv) -> None:
    observations = touching.step(np.zeros(4, np.int64))[0]
    assert observations[1, 3:7].tolist() == [0, 0, 0, 0]
    assert observations[0, 7:11].tolist() == [0, 0, 0, 0]


def test_in_tag_who_has_left_gets_nothing_and_sees_nothing(touching: NativeVectorEnv) -> None:
    touching.step(np.zeros(4, np.int64))
    observations, rewards, terminated, truncated, _ = touching.step(np.zeros(4, np.int64))
    assert not observations[2].any()
    assert (rewards[2], terminated[2], truncated[2]) == (0, False, False)


def test_in_tag_nobody_touches_who_has_left(touching: NativeVectorEnv) -> None:
    touching.step(np.zeros(4, np.int64))
    assert touching.step(np.zeros(4, np.int64))[1].tolist() == [0.01, 0, 0, 0.01]


def test_in_tag_who_has_left_does_not_move(touching: NativeVectorEnv) -> None:
    touching.step(np.zeros(4, np.int64))
    before = state_of(touching)["x"][0, 2]
    touching.step(np.full(4, 3))
    assert state_of(touching)["x"][0, 2] == before


def test_in_tag_two_may_be_touched_at_once(touching: NativeVectorEnv) -> None:
    place(touching, x=[-0.1, 0, 0.1, 0])
    assert touching.step(np.zeros(4, np.int64))[1].tolist() == [-1, 2, -1, 0.01]


def test_in_tag_the_game_is_over_when_only_it_is_left(touching: NativeVectorEnv) -> None:
    place(touching, x=[-0.1, 0, 0.1, 0], y=[0, 0, 0, 0.1])
    _, _, terminated, _, infos = touching.step(np.zeros(4, np.int64))
    assert terminated.all()
    assert not infos["alive"].any()


def test_in_tag_a_new_game_begins_in_the_step_after_the_end(touching: NativeVectorEnv) -> None:
    place(touching, x=[-0.1, 0, 0.1, 0], y=[0, 0, 0, 0.1])
    touching.step(np.zeros(4, np.int64))
    observations, rewards, _, _, infos = touching.step(np.zeros(4, np.int64))
    assert infos["alive"].all()
    assert observations[:, 2].sum() == 1
    assert not rewards.any()


def test_tag_is_cut_off_after_two_hundred_steps_for_those_in_the_game(touching: NativeVectorEnv) -> None:
    ends = [touching.step(np.zeros(4, np.int64))[3].tolist() for _ in range(200)]
    assert not np.any(ends[:-1])
    assert ends[-1] == [True, True, False, True]


def test_in_tag_agents_see_where_the_others_are_from_themselves() -> None:
    envs = begun("Tag-v0", 5)
    observations = envs.step(np.ones(20, np.int64))[0].reshape(5, 4, 15)
    for game, state in enumerate(state_of(envs)):
        for me in range(4):
            seen = observations[game, me]
            assert seen[:3].tolist() == [state["x"][me], state["y"][me], me == state["it"]]
            for k in range(1, 4):
                other = (me + k) % 4
                expected = [
                    state["x"][other] - state["x"][me],
                    state["y"][other] - state["y"][me],
                    other == state["it"],
                    1,
                ]
                np.testing.assert_allclose(seen[4 * k - 1 : 4 * k + 3], expected, atol=1e-6)
    envs.close()


def chase(state: NDArray[Any], alive: NDArray[Any]) -> NDArray[np.int64]:
    """Actions of games in which "it" follows the nearest agent and the others do not move."""
    actions = np.zeros((len(state), 4), np.int64)
    for game, (xs, ys, it) in enumerate(state.tolist()):
        ways = [
            (xs[other] - xs[it], ys[other] - ys[it]) for other in range(4) if other != it and alive[4 * game + other]
        ]
        if ways:
            dx, dy = min(ways, key=lambda way: abs(way[0]) + abs(way[1]))
            actions[game, it] = (1 if dx > 0 else 3) if abs(dx) > abs(dy) else (4 if dy > 0 else 2)
    return actions.ravel()


def test_in_tag_there_is_time_to_catch_three_who_stand_still() -> None:
    envs = make("Tag-v0", num_envs=50, copy=True)
    alive = envs.reset(seed=1)[1]["alive"]
    over = np.zeros(50, bool)
    for _ in range(200):
        alive = envs.step(chase(state_of(envs), alive))[4]["alive"]
        over |= ~alive.reshape(50, 4).any(axis=1)
    assert over.all()
    envs.close()
