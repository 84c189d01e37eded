// SPDX-License-Identifier: Apache-2.0
//! What a configuration keeps for good: blocks of pins of prefixes, and floors.
//!
//! A part of config.rs.

use super::{Config, MAX_BLOCKS, MAX_FLOORS, refuse};
use crate::types::errors::{Error, Field};

impl Config {
    /// Most blocks that pins of prefixes hold.
    #[must_use]
    pub fn most_pinned(&self) -> u32 {
        let longest = self.max_model_len.map_or(0, |longest| self.blocks_for(longest));
        let usable = self.num_usable_blocks();
        let spare = u64::from(usable - self.watermark_blocks) - longest - self.num_in_floors();
        self.max_pinned_blocks.unwrap_or_else(|| (usable / 4).min(spare as u32))
    }

    /// The tenant of requests with this salt, from 1; 0 if it has no floor.
    #[must_use]
    pub fn tenant_of(&self, salt: Option<&str>) -> u8 {
        let place = salt.and_then(|salt| self.floors.iter().position(|(each, _)| each == salt));
        place.map_or(0, |place| place as u8 + 1)
    }

    fn num_in_floors(&self) -> u64 {
        self.floors.iter().map(|(_, size)| u64::from(*size)).sum()
    }
}

/// Fails with InvalidConfig unless what is kept for good leaves room for one request.
pub(super) fn check_claims(config: &Config) -> Result<(), Error> {
    let pinned = config.max_pinned_blocks.unwrap_or(0);
    if pinned == 0 && config.floors.is_empty() {
        return Ok(());
    }
    let (field, kept, value) = match config.floors.is_empty() {
        true => ("max_pinned_blocks", "pinned blocks", pinned.into()),
        false => ("floors", "floors", sizes(config)),
    };
    let Some(longest) = config.max_model_len else {
        let reason = format!("needs max_model_len: one request must fit beside the {kept}");
        return Err(refuse(field, value, reason));
    };
    let least = config.blocks_for(longest) + u64::from(config.watermark_blocks);
    let usable = config.num_usable_blocks();
    if u64::from(usable) < u64::from(pinned) + config.num_in_floors() + least {
        let beside = match config.floors.is_empty() || pinned == 0 {
            true => "them".to_owned(),
            false => format!("them and {pinned} pinned blocks"),
        };
        let reason = format!(
            "beside {beside} one request of max_model_len={longest} tokens needs {least} blocks \
             of {usable}"
        );
        return Err(refuse(field, value, reason));
    }
    Ok(())
}

/// Fails with InvalidConfig unless each floor is a number of blocks for a salt, in their order.
pub(super) fn check_floors(config: &Config) -> Result<(), Error> {
    let reason = if config.floors.len() > MAX_FLOORS {
        format!("at most {MAX_FLOORS} floors")
    } else if config.floors.iter().any(|(salt, _)| salt.is_empty()) {
        "each is for a cache salt, a text that is not empty".to_owned()
    } else if config.floors.iter().any(|&(_, size)| !(1..=MAX_BLOCKS).contains(&size)) {
        format!("each must be an integer from 1 to {MAX_BLOCKS}")
    } else {
        debug_assert!(config.floors.is_sorted(), "floors are in the order of their salts");
        return Ok(());
    };
    Err(refuse("floors", sizes(config), reason))
}

/// The floors without their salts, which may be secret.
fn sizes(config: &Config) -> Field {
    Field::Ints(config.floors.iter().map(|&(_, size)| i64::from(size)).collect())
}
