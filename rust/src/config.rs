// SPDX-License-Identifier: Apache-2.0
//! What a manager is made for: pool sizes, groups and the options of the core.
//!
//! Rules: a configuration that cannot work is refused when it is made, with the numbers that would
//! work. Options compose; none is a fork of the code. Twin: kvcore/config.py.

use crate::errors::Error;

/// Most blocks of a pool; ids and counts are int32 in batches.
pub const MAX_BLOCKS: u32 = (1 << 31) - 1;
/// Most groups of a pool.
pub const MAX_GROUPS: usize = 64;
/// The length limit where there is none.
pub const NO_LIMIT: u32 = (1 << 31) - 1;

/// Which freed block leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The one that was freed first.
    Lru,
    /// Blocks without content, last freed first; then the one that was freed first.
    UncachedFirst,
}

/// Whether a second block of one content stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duplicates {
    /// It stays, behind the first.
    Keep,
    /// The table moves to the first when the batch is taken.
    Merge,
}

/// Layers that share block size and retention rule; here full attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Tokens a block.
    pub block_size: u32,
    /// A `Zero` follows each `Allocate` that no copy fills.
    pub zero_new_blocks: bool,
}

impl Group {
    /// A group of this block size that asks for no zeros.
    #[must_use]
    pub fn new(block_size: u32) -> Self {
        Group { block_size, zero_new_blocks: false }
    }
}

/// Sizes and options of one manager; `State::new` checks them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Blocks of the device pool, the null block included.
    pub num_blocks: u32,
    /// At least one group, all of one block size.
    pub groups: Vec<Group>,
    /// Blocks of the host tier, 0 for none.
    pub num_host_blocks: u32,
    /// Longest request in tokens; the pool must hold one such request.
    pub max_model_len: Option<u32>,
    /// Whether full blocks can be found again.
    pub enable_caching: bool,
    /// Whether block 0 of the device pool is a placeholder.
    pub null_block: bool,
    /// Which freed block leaves first.
    pub eviction: Eviction,
    /// Whether a second block of one content stays.
    pub duplicates: Duplicates,
    /// Room added behind a request when it grows, in tokens.
    pub num_preallocate_tokens: u32,
    /// Whether changes of the index are told.
    pub enable_events: bool,
    /// Root of the key chains.
    pub hash_seed: Vec<u8>,
}

impl Config {
    /// One group and the defaults of `kvcore.Config`. hash_seed: root of the key chains.
    #[must_use]
    pub fn new(num_blocks: u32, block_size: u32, hash_seed: &[u8]) -> Self {
        Config {
            num_blocks,
            groups: vec![Group::new(block_size)],
            num_host_blocks: 0,
            max_model_len: None,
            enable_caching: true,
            null_block: true,
            eviction: Eviction::Lru,
            duplicates: Duplicates::Keep,
            num_preallocate_tokens: 0,
            enable_events: false,
            hash_seed: hash_seed.to_vec(),
        }
    }

    /// Tokens a block, in every group.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.groups[0].block_size
    }

    /// Device blocks that can hold tokens.
    #[must_use]
    pub fn num_usable_blocks(&self) -> u32 {
        self.num_blocks - u32::from(self.null_block)
    }

    /// Longest request in tokens, as a number.
    #[must_use]
    pub fn length_limit(&self) -> u32 {
        self.max_model_len.unwrap_or(NO_LIMIT)
    }

    /// Blocks that one request of so many tokens holds over all groups.
    #[must_use]
    pub fn blocks_for(&self, num_tokens: u32) -> u64 {
        self.groups.iter().map(|group| u64::from(num_tokens.div_ceil(group.block_size))).sum()
    }

    /// Fails with `InvalidConfig` unless this configuration can work.
    pub fn check(&self) -> Result<(), Error> {
        check_options(self)?;
        check_groups(self)?;
        check_sizes(self)
    }
}

fn check_options(config: &Config) -> Result<(), Error> {
    check_count("num_host_blocks", config.num_host_blocks, 0)?;
    check_count("num_preallocate_tokens", config.num_preallocate_tokens, 0)?;
    config.max_model_len.map_or(Ok(()), |longest| check_count("max_model_len", longest, 1))
}

fn check_groups(config: &Config) -> Result<(), Error> {
    let sizes: Vec<u32> = config.groups.iter().map(|group| group.block_size).collect();
    let shown = sizes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
    if sizes.is_empty() {
        return Err(refuse("groups", shown, "at least one group".to_owned()));
    }
    if sizes.len() > MAX_GROUPS {
        return Err(refuse("groups", shown, format!("at most {MAX_GROUPS} groups")));
    }
    for &size in &sizes {
        if !(1..=MAX_BLOCKS).contains(&size) {
            return Err(refuse("block_size", size, "must be at least 1".to_owned()));
        }
        if size != sizes[0] {
            let reason = "all groups must have one block size".to_owned();
            return Err(refuse("groups", shown, reason));
        }
    }
    Ok(())
}

fn check_sizes(config: &Config) -> Result<(), Error> {
    check_count("num_blocks", config.num_blocks, 1)?;
    let null = if config.null_block { " and the null block" } else { "" };
    let least = config.groups.len() as u64;
    let total = least + u64::from(config.null_block);
    if u64::from(config.num_usable_blocks()) < least {
        let blocks = if least == 1 { "1 block".to_owned() } else { format!("{least} blocks") };
        let reason = format!("one request needs {blocks}{null}, so {total}");
        return Err(refuse("num_blocks", config.num_blocks, reason));
    }
    if let Some(longest) = config.max_model_len {
        let least = config.blocks_for(longest);
        let total = least + u64::from(config.null_block);
        if u64::from(config.num_usable_blocks()) < least {
            let reason = format!(
                "one request of max_model_len={longest} tokens needs {least} blocks{null}, \
                 so {total}"
            );
            return Err(refuse("num_blocks", config.num_blocks, reason));
        }
    }
    Ok(())
}

fn check_count(field: &'static str, value: u32, least: u32) -> Result<(), Error> {
    if value < least {
        return Err(refuse(field, value, format!("must be an integer of at least {least}")));
    }
    if value > MAX_BLOCKS {
        return Err(refuse(field, value, format!("must be at most {MAX_BLOCKS}")));
    }
    Ok(())
}

fn refuse(field: &'static str, value: impl ToString, reason: String) -> Error {
    Error::InvalidConfig { field, value: value.to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_smaller_than_one_request_says_how_many_are_needed() {
        let mut config = Config::new(5, 4, b"");
        assert_eq!(config.check(), Ok(()));
        config.max_model_len = Some(17);
        let message = config.check().expect_err("17 tokens need 5 blocks").to_string();
        let reason =
            "one request of max_model_len=17 tokens needs 5 blocks and the null block, so 6";
        assert_eq!(message, format!("config num_blocks=5: {reason}"));
    }

    #[test]
    fn sizes_that_cannot_work_are_refused() {
        assert!(Config::new(0, 4, b"").check().is_err());
        assert!(Config::new(1, 4, b"").check().is_err());
        assert!(Config::new(2, 0, b"").check().is_err());
        let mut mixed = Config::new(9, 4, b"");
        mixed.groups.push(Group::new(8));
        assert!(mixed.check().is_err());
        mixed.groups.clear();
        assert!(mixed.check().is_err());
    }
}
