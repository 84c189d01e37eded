// SPDX-License-Identifier: Apache-2.0
//! Small worlds, explored to their end: as many states and edges as in Python.

use crate::check::check_world;
use crate::check::search::report::{End, Report};
use crate::check::search::search::Limits;
use crate::check::world::world::{Symmetry, World};
use crate::types::config::Config;
use crate::types::violation::Checks;

/// Return a world of this many usable blocks of two tokens, requests, tokens and prompt tokens.
fn world(num_blocks: u32, num_requests: u32, num_tokens: u32, num_prompt: u32) -> World {
    let mut config = Config::new(num_blocks, 2, b"explored");
    config.null_block = false;
    World::new(config, num_requests, num_tokens, num_prompt)
}

fn run(world: World, workers: usize) -> Report {
    let limits = Limits::default();
    let checks = Checks::default();
    check_world(world, Symmetry::default(), false, checks, &limits, workers, &mut |_| true).unwrap()
}

fn counts(report: &Report) -> (u64, u64) {
    assert_eq!((report.story.clone(), report.end), (None, End::Complete));
    (report.num_states, report.num_edges)
}

#[test]
fn a_small_world_has_as_many_states_and_edges_as_in_python() {
    assert_eq!(counts(&run(world(2, 2, 3, 3), 1)), (581, 4670));
}

#[test]
fn several_workers_find_what_one_finds() {
    let (one, two) = (run(world(2, 2, 3, 3), 1), run(world(2, 2, 3, 3), 2));
    assert_eq!(counts(&one), counts(&two));
    assert_eq!((one.depths, one.notes.sorted()), (two.depths, two.notes.sorted()));
}
