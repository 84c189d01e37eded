// SPDX-License-Identifier: Apache-2.0
//! What a manager is made for: pool sizes, groups and the options of the core.
//!
//! Invariants: a configuration that cannot work is refused when it is made, and the error names
//! numbers that would work. All options can be combined.
//! Twin: kvcore/types/config.py.

use alignment::{check_hash_unit, lcm};
use claims::{check_claims, check_floors};

use crate::types::clone_in_place::clone_in_place;
use crate::types::errors::{Error, Field};
use crate::types::groups::{Group, admission_cap, most_states};
use crate::types::keys::Hashing;

/// Most blocks of a pool; ids and counts are int32 in batches.
pub const MAX_BLOCKS: u32 = (1 << 31) - 1;
/// The last epoch.
pub const MAX_EPOCH: u32 = (1 << 31) - 1;
/// Most groups of a pool.
pub const MAX_GROUPS: usize = 64;
/// Most floors of a pool.
pub const MAX_FLOORS: usize = 16;
/// Most taken batches that may be in flight at a time.
pub const MAX_IN_FLIGHT: u32 = 62;
/// The length limit if none is configured.
pub const NO_LIMIT: u32 = (1 << 31) - 1;

/// Which freed block leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// The one that was freed first.
    Lru,
    /// Blocks without content, last freed first; then the one that was freed first.
    UncachedFirst,
    /// The one that was freed first of those that no waiting request will look up; then the one
    /// that is due last.
    QueueAware,
    /// The one whose content's use before the last is longest ago.
    Lru2,
    /// New contents from a small queue, the others from a main one.
    S3Fifo,
    /// The one of the kind that is least often used again.
    Learned,
    /// Blocks without content, then by level, then the one that was freed first.
    Retention,
}

/// All policies with their names, in the order of their codes.
pub const EVICTIONS: [(Eviction, &str); 7] = [
    (Eviction::Lru, "lru"),
    (Eviction::UncachedFirst, "uncached_first"),
    (Eviction::QueueAware, "queue_aware"),
    (Eviction::Lru2, "lru2"),
    (Eviction::S3Fifo, "s3fifo"),
    (Eviction::Learned, "learned"),
    (Eviction::Retention, "retention"),
];

impl Eviction {
    /// The policy of this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        EVICTIONS.iter().find(|(_, each)| *each == name).map(|&(policy, _)| policy)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        EVICTIONS[self as usize].1
    }
}

/// Whether a second block of one content stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duplicates {
    /// It stays, behind the first.
    Keep,
    /// The table moves to the first when the batch is taken.
    Merge,
}

/// When full blocks become findable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Publish {
    /// From the call on that schedules their last token.
    Scheduled,
    /// Once the batch that writes it is completed.
    Completed,
}

clone_in_place! {
    /// Sizes and options of one manager; `make_state` checks them.
    #[derive(Debug, PartialEq, Eq)]
    pub struct Config {
        /// Blocks of the device pool, the null block included.
        pub num_blocks: u32,
        /// At least one group.
        pub groups: Vec<Group>,
        /// Blocks of the host tier, 0 for none.
        pub num_host_blocks: u32,
        /// Longest request in tokens; the pool must hold one such request.
        pub max_model_len: Option<u32>,
        /// Most tokens that one step computes of a request, None for max_model_len.
        pub max_num_batched_tokens: Option<u32>,
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
        /// Blocks that an admission leaves free.
        pub watermark_blocks: u32,
        /// A hit leaves its last matched block to be computed, in the groups flagged `eagle`, in
        /// all but state groups if none is.
        pub use_eagle: bool,
        /// Whether changes of the index are emitted as events.
        pub enable_events: bool,
        /// Keep what `take_new_block_ids` hands out.
        pub record_new_blocks: bool,
        /// How block hashes are made.
        pub hashing: Hashing,
        /// Root of the key chains.
        pub hash_seed: Vec<u8>,
        /// Taken batches that may be unfinished at a time; 0: taking a batch completes it.
        pub max_in_flight: u32,
        /// When full blocks become findable.
        pub publish: Publish,
        /// Events have a digest of a request's salt, not the salt.
        pub hide_salts: bool,
        /// Number of the weights at the start.
        pub epoch: u32,
        /// Most blocks that pins of prefixes hold, None for a quarter of the pool, or what one
        /// request leaves.
        pub max_pinned_blocks: Option<u32>,
        /// By the salt of requests, in its order: the blocks of their content that requests of
        /// other salts leave cached.
        pub floors: Vec<(String, u32)>,
        /// Tokens that one block hash stands for, if that is less than the groups' common divisor:
        /// hits may then end inside blocks.
        pub hash_unit: Option<u32>,
    }
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
            max_num_batched_tokens: None,
            enable_caching: true,
            null_block: true,
            eviction: Eviction::Lru,
            duplicates: Duplicates::Keep,
            num_preallocate_tokens: 0,
            watermark_blocks: 0,
            use_eagle: false,
            enable_events: false,
            record_new_blocks: false,
            hashing: Hashing::Sha256,
            hash_seed: hash_seed.to_vec(),
            max_in_flight: 0,
            publish: Publish::Scheduled,
            hide_salts: false,
            epoch: 0,
            max_pinned_blocks: None,
            floors: Vec::new(),
            hash_unit: None,
        }
    }

    /// Device blocks that can hold tokens.
    #[must_use]
    pub fn num_usable_blocks(&self) -> u32 {
        self.num_blocks - u32::from(self.null_block)
    }

    /// The longest request in tokens, never None.
    #[must_use]
    pub fn length_limit(&self) -> u32 {
        self.max_model_len.unwrap_or(NO_LIMIT)
    }

    /// Whether batches remember their effects on requests.
    #[must_use]
    pub fn tracks_batches(&self) -> bool {
        self.max_in_flight > 0 || self.publish == Publish::Completed
    }

    /// Whether full blocks are findable from the call on that schedules their last token.
    #[must_use]
    pub(crate) fn publishes_at_once(&self) -> bool {
        self.enable_caching && self.publish == Publish::Scheduled
    }

    /// Whether a hit leaves this group's last matched block to be computed.
    #[must_use]
    pub fn drops_last_hit(&self, group_id: u32) -> bool {
        let flagged = self.groups.iter().any(|each| each.eagle);
        let group = &self.groups[group_id as usize];
        self.use_eagle && (group.eagle || !(flagged || group.is_state()))
    }

    /// Return the most blocks that a request holds at once in a group; None if the group keeps
    /// everything.
    ///
    /// num_to_come: its scheduled positions whose tokens are not yet known.
    #[must_use]
    pub fn cap(&self, group_id: u32, num_to_come: u32) -> Option<u32> {
        let group = &self.groups[group_id as usize];
        if group.is_state() {
            return Some(most_states(group, num_to_come));
        }
        let limit = self.length_limit();
        let step = self.max_num_batched_tokens.unwrap_or(limit).saturating_add(num_to_come);
        admission_cap(group, step, limit)
    }

    /// Return the most blocks that a request holds in all groups until it has `num_tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, num_tokens: u32) -> u64 {
        let held = |(index, group): (u32, &Group)| {
            let blocks = num_tokens.div_ceil(group.block_size) + group.draft_states;
            u64::from(self.cap(index, 0).map_or(blocks, |cap| blocks.min(cap)))
        };
        (0..).zip(&self.groups).filter(|(_, group)| !group.is_cross()).map(held).sum()
    }

    /// Fails with `InvalidConfig` or `GroupsDoNotFit` unless this configuration can work.
    pub fn check(&self) -> Result<(), Error> {
        check_options(self)?;
        check_groups(self)?;
        check_hash_unit(self)?;
        check_sizes(self)
    }
}

fn check_options(config: &Config) -> Result<(), Error> {
    if config.hashing == Hashing::Sha256Cbor && str::from_utf8(&config.hash_seed).is_err() {
        let seed = Field::Bytes(config.hash_seed.clone());
        return Err(refuse("hash_seed", seed, "must be UTF-8 text for sha256_cbor"));
    }
    check_count("num_host_blocks", config.num_host_blocks, 0)?;
    check_count("num_preallocate_tokens", config.num_preallocate_tokens, 0)?;
    check_count("watermark_blocks", config.watermark_blocks, 0)?;
    check_count("max_in_flight", config.max_in_flight, 0)?;
    check_count("epoch", config.epoch, 0)?;
    if config.max_in_flight > MAX_IN_FLIGHT {
        let reason = format!("must be at most {MAX_IN_FLIGHT}");
        return Err(refuse("max_in_flight", config.max_in_flight, reason));
    }
    config.max_model_len.map_or(Ok(()), |longest| check_count("max_model_len", longest, 1))?;
    let batched = config.max_num_batched_tokens;
    batched.map_or(Ok(()), |most| check_count("max_num_batched_tokens", most, 1))?;
    config.max_pinned_blocks.map_or(Ok(()), |most| check_count("max_pinned_blocks", most, 0))?;
    check_floors(config)
}

fn check_groups(config: &Config) -> Result<(), Error> {
    let groups = &config.groups;
    if groups.is_empty() {
        return Err(refuse("groups", Field::Ints(Vec::new()), "at least one group"));
    }
    groups.iter().try_for_each(Group::check)?;
    if groups.len() > MAX_GROUPS {
        return Err(refuse("groups", groups.len() as i64, format!("at most {MAX_GROUPS} groups")));
    }
    let pages = groups.iter().enumerate();
    let said: Vec<(usize, u64)> =
        pages.filter_map(|(index, group)| Some((index, group.page_bytes?))).collect();
    if said.iter().any(|(_, size)| *size != said[0].1) {
        let groups = said.iter().map(|&(index, _)| index as i64).collect();
        let sizes = said.iter().map(|&(_, size)| size as i64).collect();
        return Err(Error::GroupsDoNotFit { groups, sizes });
    }
    let is_cross = groups.iter().all(Group::is_cross);
    for group in groups {
        let reason = if is_cross {
            "cross-attention needs a group beside it that holds the request's own tokens"
        } else if group.is_state() && !config.null_block {
            "a state group needs the null block"
        } else if group.is_windowed() && !config.null_block {
            "a group with a window needs the null block"
        } else if group.is_cross() && config.enable_caching {
            "cross-attention blocks are never cached: set enable_caching=False"
        } else if group.eagle && !config.use_eagle {
            "a group is flagged eagle, but use_eagle is off"
        } else {
            continue;
        };
        let kinds: Vec<String> = groups.iter().map(|each| each.kind.name().to_owned()).collect();
        return Err(refuse("groups", kinds, reason));
    }
    if lcm(groups.iter().map(|group| u64::from(group.block_size))) > u64::from(MAX_BLOCKS) {
        let sizes: Vec<i64> = groups.iter().map(|group| group.block_size.into()).collect();
        let reason =
            format!("the least common multiple of the block sizes must be at most {MAX_BLOCKS}");
        return Err(refuse("groups", sizes, reason));
    }
    Ok(())
}

fn check_sizes(config: &Config) -> Result<(), Error> {
    check_count("num_blocks", config.num_blocks, 1)?;
    let null = if config.null_block { " and the null block" } else { "" };
    let kept = u64::from(config.watermark_blocks);
    let rest = if kept == 0 { null.to_owned() } else { format!("{null}, {kept} stay free") };
    let more = kept + u64::from(config.null_block);
    let least = config.groups.len() as u64;
    if u64::from(config.num_usable_blocks()) < least + kept {
        let blocks = if least == 1 { "1 block".to_owned() } else { format!("{least} blocks") };
        let reason = format!("one request needs {blocks}{rest}, so {}", least + more);
        return Err(refuse("num_blocks", config.num_blocks, reason));
    }
    if let Some(longest) = config.max_model_len {
        let least = config.blocks_for(longest);
        if u64::from(config.num_usable_blocks()) < least + kept {
            let reason = format!(
                "one request of max_model_len={longest} tokens needs {least} blocks{rest}, so {}",
                least + more
            );
            return Err(refuse("num_blocks", config.num_blocks, reason));
        }
    }
    check_claims(config)
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

fn refuse(field: &'static str, value: impl Into<Field>, reason: impl Into<String>) -> Error {
    Error::InvalidConfig { field, value: value.into(), reason: reason.into() }
}

mod alignment;
mod claims;
#[cfg(test)]
mod tests;
