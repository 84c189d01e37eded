// SPDX-License-Identifier: Apache-2.0
//! The lengths at which a configuration hashes tokens, and at which hits end.
//!
//! A part of config.rs.

use super::{Config, Eviction, refuse};
use crate::types::errors::Error;

impl Config {
    /// Tokens that one block hash stands for: by default the groups' greatest common divisor.
    #[must_use]
    pub fn hash_block_size(&self) -> u32 {
        self.hash_unit.unwrap_or_else(|| common_divisor(self))
    }

    /// Set the tokens that one block hash stands for; the default is not stored.
    pub(crate) fn set_hash_block_size(&mut self, num_tokens: u32) {
        self.hash_unit = Some(num_tokens).filter(|&unit| unit != common_divisor(self));
    }

    /// Whether hits may end inside blocks, which then have tail keys.
    #[must_use]
    pub fn has_tails(&self) -> bool {
        self.hash_unit.is_some() && self.enable_caching
    }

    /// Tokens that a hit is a multiple of: those of a block hash if hits may end inside blocks,
    /// else whole blocks of all groups but state groups, whose checkpoints decide which ones.
    #[must_use]
    pub fn hit_alignment(&self) -> u32 {
        if self.has_tails() {
            return self.hash_block_size();
        }
        let groups = self.groups.iter().filter(|group| !group.is_state());
        let sizes = groups.map(|group| u64::from(group.block_size));
        u32::try_from(lcm(sizes.chain([u64::from(self.hash_block_size())]))).unwrap_or(u32::MAX)
    }

    /// The least number of tokens in whole blocks of all groups.
    #[must_use]
    pub fn block_alignment(&self) -> u32 {
        let sizes = self.groups.iter().map(|group| u64::from(group.block_size));
        u32::try_from(lcm(sizes)).unwrap_or(u32::MAX)
    }

    /// Hashes of one block of a group.
    #[must_use]
    pub fn scale(&self, group_id: u32) -> u32 {
        self.groups[group_id as usize].block_size / self.hash_block_size()
    }
}

/// Fails with InvalidConfig unless hits may end inside blocks at multiples of the hash unit.
pub(super) fn check_hash_unit(config: &Config) -> Result<(), Error> {
    let Some(unit) = config.hash_unit else { return Ok(()) };
    super::check_count("hash_block_size", unit, 1)?;
    let common = common_divisor(config);
    let reason = if !common.is_multiple_of(unit) {
        format!("must divide the block sizes, whose greatest common divisor is {common}")
    } else if !matches!(config.eviction, Eviction::Lru | Eviction::UncachedFirst) {
        "hits inside blocks need the eviction policy lru or uncached_first".to_owned()
    } else if !config.floors.is_empty() {
        "hits inside blocks cannot be combined with floors".to_owned()
    } else {
        return Ok(());
    };
    Err(refuse("hash_block_size", unit, reason))
}

fn common_divisor(config: &Config) -> u32 {
    config.groups.iter().map(|group| u64::from(group.block_size)).fold(0, gcd) as u32
}

/// Sizes beyond any that is allowed give some number beyond, too.
pub(super) fn lcm(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(1, |total, size| (total / gcd(total, size)).saturating_mul(size))
}

fn gcd(mut common: u64, mut rest: u64) -> u64 {
    while rest > 0 {
        (common, rest) = (rest, common % rest);
    }
    common
}
