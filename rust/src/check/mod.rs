// SPDX-License-Identifier: Apache-2.0
//! The checker: every state of a small world, over the twin's own transitions.
//!
//! There is no second model. What a call must be given is enumerated by `actions.rs`, made by
//! `calls.rs`, checked by the files of properties, folded by `canonical.rs` and led by `search.rs`.
//! No transition calls anything here. The same worlds give the same counts of states and edges, and
//! the same names of properties, as kvcore/check/*.py.

pub mod names;
pub mod properties;
pub mod search;
#[cfg(test)]
mod tests;
pub mod world;
use std::sync::Arc;

use crate::check::names::fingerprints::Keys;
use crate::check::search::core_model::CoreModel;
use crate::check::search::flight_model::FlightModel;
use crate::check::search::report::Report;
use crate::check::search::search::{Limits, Progress, explore};
use crate::check::world::model::Findings;
use crate::check::world::world::{Symmetry, World};
use crate::oracle::prefixes::Prefixes;
use crate::types::errors::Error;
use crate::types::violation::Checks;

/// Explore a world with this many workers. full_keys: keep whole names, not fingerprints. watch: is
/// told now and then how far the search has come, and says whether it goes on. Fails with
/// InvalidConfig.
pub fn check_world(
    world: World,
    symmetry: Symmetry,
    full_keys: bool,
    checks: Checks,
    limits: &Limits,
    workers: usize,
    watch: &mut dyn FnMut(&Progress) -> bool,
) -> Result<Report, Error> {
    let world = Arc::new(world);
    let prefixes = Prefixes::new(&world.config);
    let keys = Keys::new(full_keys);
    let model = |_| {
        let (world, keys) = (Arc::clone(&world), keys.clone());
        CoreModel::new(world, symmetry, keys, checks.clone(), prefixes.clone())
    };
    let mut models = (0..workers.max(1)).map(model).collect::<Result<Vec<_>, _>>()?;
    let weighed = |report: Report| {
        let num_bytes = report.num_bytes + keys.num_bytes() as u64;
        Report { num_bytes, ..report }
    };
    if world.config.max_in_flight == 0 && world.num_output_placeholders == 0 {
        return Ok(weighed(explore(&mut models, limits, watch)));
    }
    let in_flight = |core| FlightModel::new(core, &checks);
    let mut models: Vec<FlightModel> = models.into_iter().map(in_flight).collect();
    Ok(weighed(explore(&mut models, limits, watch)))
}

/// Return every state of a world, up to this many: its canonical bytes, and the names of the
/// structural properties that do not hold there. Fails with InvalidConfig.
pub fn check_states(world: World, max_states: Option<u64>) -> Result<Vec<Findings>, Error> {
    check_in_flight(&world)?;
    let world = Arc::new(world);
    let prefixes = Prefixes::new(&world.config);
    let none = Checks::only(None);
    let mut model = CoreModel::new(world, Symmetry::default(), Keys::new(false), none, prefixes)?;
    Ok(search::search::checker(&mut model, max_states))
}

/// Fails with InvalidConfig if batches are in flight: a state is then no whole node.
fn check_in_flight(world: &World) -> Result<(), Error> {
    match world.config.max_in_flight {
        0 => Ok(()),
        most => Err(Error::InvalidConfig {
            field: "max_in_flight",
            value: most.into(),
            reason: "the twin checks states of worlds without batches in flight".to_owned(),
        }),
    }
}
