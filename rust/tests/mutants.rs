// SPDX-License-Identifier: Apache-2.0
//! The score of the twin's seeded bugs: each must be found by the properties, in a short run.
//!
//! Each bug has the smallest known world that shows it. It is hunted twice: by all properties, and
//! by the properties that users observe. A bug that users cannot observe gives the reason. The
//! program prints a table and exits with code 1 if a bug survives.
//! Twin: kvcore/check/cli/mutants.py.

use std::process::ExitCode;
use std::time::Instant;

use kvcore::check::check_world;
use kvcore::check::search::report::Report;
use kvcore::check::search::search::Limits;
use kvcore::check::world::world::{Moves, Symmetry, World};
use kvcore::mutants::{Mutant, seed};
use kvcore::types::config::{Config, Duplicates, Publish};
use kvcore::types::groups::{Group, Kind};
use kvcore::types::violation::Checks;

/// Calls of a story, at most.
const LONGEST_RUN: usize = 8;
/// So many states of a world are searched.
const STATES_MAX: u64 = 10_000;
/// What users see: wrong contents, crashes, what is lost for good, who is stuck.
const OBSERVABLE: [&str; 8] = [
    "KV-READ",
    "NOCRASH",
    "LEAK",
    "DRAIN",
    "DEADLOCK-FREE",
    "L-ADMIT",
    "SWAP-RETURN",
    "ADMIT-NEVER",
];

/// A seeded bug, the world that shows it, its row of the catalogue (0 for the twin's own), and why
/// no user sees it, where that is so.
struct Seeded(Mutant, World, u32, Option<&'static str>);

fn seeded() -> Vec<Seeded> {
    let hits = Some("only hits are lost");
    let mirror = Some("the worker's tables are wrong, which this ghost reads from the state");
    let behind = Some("seen in later batches, and contents are followed for one here");
    let refused = Some("a name cannot be used again: calls are refused, no content is wrong");
    let told = Some("what listens to events is told wrong things, no request is");
    vec![
        Seeded(Mutant::AllocRef0, world(2, 1, 2), 23, None),
        Seeded(Mutant::TouchNotDequeued, world(2, 2, 3), 21, None),
        Seeded(Mutant::EvictKeepsIndex, world(2, 2, 3), 1, None),
        Seeded(Mutant::EvictDropsDups, world(3, 2, 3), 4, None),
        Seeded(Mutant::IndexComparesBuckets, world(2, 2, 3), 0, None),
        Seeded(Mutant::EventPerCopy, with_events(world(2, 2, 2)), 5, told),
        Seeded(Mutant::CounterDrifts, world(2, 1, 2), 27, None),
        Seeded(Mutant::FreeForgetsABlock, world(2, 1, 2), 28, None),
        Seeded(Mutant::FreeHeadFirst, world(3, 1, 4), 53, hits),
        Seeded(Mutant::CutNotTold, world(2, 1, 2), 49, mirror),
        Seeded(Mutant::CowNoCopy, world(3, 2, 3), 41, None),
        Seeded(Mutant::SharedWrittenInPlace, world(2, 2, 2), 41, None),
        Seeded(Mutant::KeyedWrittenInPlace, more(world(2, 2, 3), &["truncate"]), 43, None),
        Seeded(Mutant::ForkKeepsQuiet, fours(three_calls(world(2, 2, 4))), 41, behind),
        Seeded(Mutant::QuietStepNotCounted, fours(two_calls(world(1, 1, 2))), 0, None),
        Seeded(Mutant::HitsCostNothing, world(2, 2, 4), 16, None),
        Seeded(Mutant::CacheWholePrompt, calls(world(2, 2, 3)), 37, behind),
        Seeded(Mutant::FullHit, world(2, 2, 2), 39, None),
        Seeded(Mutant::ResetInUse, world(2, 1, 2), 54, hits),
        Seeded(Mutant::LeavingKeepsKeys, two_calls(world(2, 2, 3)), 72, behind),
        Seeded(Mutant::TruncateKeepsHashes, more(world(2, 2, 3), &["truncate"]), 7, None),
        Seeded(Mutant::MergeNoRemap, merging(two_calls(world(2, 2, 2))), 32, None),
        Seeded(Mutant::TrimNotTold, windowed(world(3, 1, 4)), 49, mirror),
        Seeded(Mutant::RowMapKeepsPlace, three_calls(world(3, 3, 2)), 0, behind),
        Seeded(Mutant::ChainLosesKeys, two_calls(world(3, 2, 4)), 72, behind),
        Seeded(Mutant::RemoveKeepsRow, world(2, 1, 2), 0, refused),
    ]
    .into_iter()
    .chain(seeded_in_flight())
    .collect()
}

/// The bugs of batches in flight.
fn seeded_in_flight() -> Vec<Seeded> {
    let hits = Some("only hits are lost");
    let mirror = Some("the worker's tables are wrong, which this ghost reads from the state");
    let order = Some("batches that run one after the other hide it");
    let bytes = Some("the state has other bytes, no request counts or reads another thing");
    let completed = || late(one_letter(flying(slots(world(2, 1, 3)), 2)));
    vec![
        Seeded(Mutant::FreedUnderABatch, flying(world(2, 2, 2), 1), 56, order),
        Seeded(Mutant::FirstBatchEndsAllUses, flying(world(2, 1, 2), 2), 56, order),
        Seeded(Mutant::CopyHoldsNothing, swapping(flying(world(2, 2, 2), 1)), 57, order),
        Seeded(Mutant::QuarantineNeverEnds, flying(world(2, 1, 2), 1), 56, None),
        Seeded(Mutant::HeldOfTheFirst, two_calls(flying(slots(world(3, 2, 2)), 1)), 0, order),
        Seeded(Mutant::RemovedStaysMarked, flying(world(2, 1, 2), 1), 0, None),
        Seeded(Mutant::LostPlacesStay, flying(windowed(world(3, 1, 3)), 2), 0, bytes),
        Seeded(Mutant::CancelKeepsKeys, flying(slots(world(2, 1, 2)), 1), 34, None),
        Seeded(Mutant::CancelKeepsCounts, flying(world(2, 1, 2), 1), 37, None),
        Seeded(Mutant::CancelLeavesTables, flying(world(2, 1, 2), 1), 49, mirror),
        Seeded(Mutant::PublishesInFlight, completed(), 34, None),
        Seeded(Mutant::PublishedLate, late(flying(world(2, 1, 2), 1)), 0, hits),
    ]
}

/// So many usable blocks of two tokens, requests and tokens; what an engine does.
fn world(num_blocks: u32, num_requests: u32, num_tokens: u32) -> World {
    let mut config = Config::new(num_blocks, 2, b"mutants");
    config.null_block = false;
    let world = World::new(config, num_requests, num_tokens, num_tokens);
    World { moves: Moves::Engine, ..world }
}

fn more(mut world: World, calls: &[&str]) -> World {
    world.calls.extend(calls.iter().map(|&call| call.to_owned()));
    world
}

fn calls(world: World) -> World {
    World { moves: Moves::Calls, ..world }
}

fn two_calls(world: World) -> World {
    World { calls_per_batch: 2, ..world }
}

fn three_calls(world: World) -> World {
    World { calls_per_batch: 3, num_letters: 1, ..world }
}

fn with_events(mut world: World) -> World {
    world.config.enable_events = true;
    world
}

fn merging(mut world: World) -> World {
    world.config.duplicates = Duplicates::Merge;
    world
}

fn flying(mut world: World, max_in_flight: u32) -> World {
    world.config.max_in_flight = max_in_flight;
    world
}

fn slots(mut world: World) -> World {
    world.config.groups = vec![Group::new(1)];
    world
}

fn fours(mut world: World) -> World {
    world.config.groups = vec![Group::new(4)];
    world
}

fn one_letter(world: World) -> World {
    World { num_letters: 1, ..world }
}

fn late(mut world: World) -> World {
    world.config.publish = Publish::Completed;
    world
}

fn swapping(mut world: World) -> World {
    world.config.num_host_blocks = 2;
    more(world, &["swap_out", "swap_in"])
}

fn windowed(mut world: World) -> World {
    world.config = Config::new(world.config.num_blocks + 1, 1, b"mutants");
    world.config.groups = vec![Group::windowed(1, Kind::SlidingWindow, 2)];
    world
}

fn hunt(mutant: Mutant, world: &World, checks: Checks, max_states: Option<u64>) -> (Report, f64) {
    seed(Some(mutant));
    let begun = Instant::now();
    let limits = Limits { max_states, max_seconds: Some(120.0), ..Limits::default() };
    let found =
        check_world(world.clone(), Symmetry::default(), false, checks, &limits, 1, &mut |_| true);
    let seconds = begun.elapsed().as_secs_f64();
    seed(None);
    (found.expect("the worlds are right"), seconds)
}

/// What found it, and by how many operations.
fn found(report: &Report) -> Option<(&'static str, usize)> {
    let story = report.story.as_ref()?;
    let operations = story.edges.len();
    Some((story.violation.property, operations))
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|_| {})); // a crash is found as NOCRASH
    let bugs = seeded();
    println!(
        "{:<24} {:>3}  {:<12} {:>3}  {:<8} {:>7} {:>7}  users see",
        "seeded bug", "row", "found by", "ops", "scope", "states", "seconds"
    );
    let mut lived = 0;
    for Seeded(mutant, world, row, unseen) in &bugs {
        let (report, seconds) = hunt(*mutant, world, Checks::default(), Some(STATES_MAX));
        let names = OBSERVABLE.iter().map(|&name| name.to_owned());
        let (seen, _) = hunt(*mutant, world, Checks::only(names), Some(STATES_MAX));
        let (by, length) = found(&report).unwrap_or(("-", 0));
        let observed = found(&seen).map(|(name, _)| name);
        let scope = [world.config.num_blocks, world.num_requests, world.num_tokens];
        let lives = by == "-" || length > LONGEST_RUN || observed.is_none() != unseen.is_some();
        lived += u32::from(lives);
        println!(
            "{:<24} {:>3}  {by:<12} {length:>3}  {:<8} {:>7} {seconds:>7.2}  {}{}",
            format!("{mutant:?}"),
            if *row == 0 { "-".to_owned() } else { row.to_string() },
            scope.map(|each| each.to_string()).join("x"),
            report.num_states,
            observed.or(*unseen).unwrap_or("nothing"),
            if lives { "  << lives" } else { "" },
        );
    }
    println!("{} of {} seeded bugs of the twin are killed", bugs.len() as u32 - lived, bugs.len());
    if lived == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
