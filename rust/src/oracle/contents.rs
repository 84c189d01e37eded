// SPDX-License-Identifier: Apache-2.0
//! What every slot really holds, followed through the commands: an independent check of the core.
//!
//! No transition calls anything here. A slot's content is the identity of a prefix (a number for
//! "this, up to and with this token", `prefixes.rs`) and a group, or unknown. Contents change only
//! as a runtime would change them: by the commands of a batch, and by the forward pass after it,
//! which loads external tokens, writes the scheduled ones and rubbish into lookahead slots. Every
//! query of that pass must find what its group lets it see; in a state group it finds the state
//! before the step in the block to which it then writes the state after it. A load that fails
//! leaves spoilt slots, and so does whatever is computed from them. The null block is neither
//! written nor read. A block that loses its content (handed out, freed or evicted without owner)
//! becomes unknown at once, which is stricter than memory is. All slots lie in one column, and
//! nothing is made anew from edge to edge. Twin: kvcore/oracle/content_oracle.py,
//! kvcore/check/world/ghost.py.

pub mod forward;
pub mod mirror;
pub mod states;

use crate::oracle::prefixes::{Numbers, Prefixes};
use crate::oracle::schedule::Schedule;
use crate::oracle::schedule::writes::Encoder;
use crate::state::state::{NO_HOST_BLOCK, State};
use crate::types::commands::Tier;
use crate::types::config::Config;
use crate::types::groups::{Group, skipped_tokens};
use crate::types::ids::{BlockId, Row, Table};
use crate::types::keys::Key;
use crate::types::violation::{Checks, Violation};

/// Result of a check.
pub type Checked = Result<(), Violation>;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Content {
    /// Anything.
    #[default]
    Unknown,
    /// What no query must see.
    Rubbish,
    /// Zeros.
    Zeros,
    /// What a failed load left, or was computed from it.
    Spoilt,
    /// Keys and values of the last token of a prefix, in a group.
    Prefix(u32, u8),
    /// Those of a token of an encoder's run, in a group.
    Encoded(u32, u8),
}

/// A block of a tier.
pub type TierBlock = (Tier, BlockId);

/// The contents of all blocks, and what follows from the commands alone: tables and owners.
#[derive(Debug)]
pub struct Ghost {
    pub(crate) groups: Vec<Group>,
    pub(crate) checks: Checks,
    /// Blocks of the device pool, of all tiers and none, and slots that there are for each.
    num_blocks: usize,
    num_places: usize,
    pub(crate) size: usize,
    num_nulls: u32,
    /// Whether blocks can have tail keys.
    pub(crate) has_tails: bool,
    /// By block, those of the host behind those of the device, and then one for none.
    pub(crate) contents: Vec<Content>,
    /// By row and group.
    pub(crate) tables: Vec<Table>,
    /// By block of the device.
    pub(crate) marks: Vec<Marks>,
    /// Unfinished loads that were executed.
    pub(crate) loads: Vec<Loading>,
    /// That of the weights.
    pub(crate) epoch: u32,
    /// By row: the numbers of the request's positions, found anew before each use.
    pub(crate) nodes: Vec<Numbers>,
}

/// An unfinished load that was executed: operation, key, block, and the epoch of its batch.
pub(crate) type Loading = (u32, Key, BlockId, u32);

/// What the commands say of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Marks {
    pub(crate) owned: bool,
    /// It has a key and no owner.
    pub(crate) cached: bool,
    /// It was handed out, and nothing filled it.
    pub(crate) empty: bool,
    /// It lost a key and may have another, if a block can have several.
    pub(crate) evicted: bool,
}

impl Clone for Ghost {
    fn clone(&self) -> Self {
        Ghost {
            groups: self.groups.clone(),
            checks: self.checks.clone(),
            contents: self.contents.clone(),
            tables: self.tables.clone(),
            marks: self.marks.clone(),
            loads: self.loads.clone(),
            nodes: Vec::new(),
            ..*self
        }
    }

    /// Every edge begins with this, so it keeps the room; source: of the same configuration.
    fn clone_from(&mut self, source: &Self) {
        self.contents.clone_from(&source.contents);
        self.tables.clone_from(&source.tables);
        self.marks.clone_from(&source.marks);
        self.loads.clone_from(&source.loads);
        self.epoch = source.epoch;
        self.nodes.clear();
    }
}

impl Ghost {
    /// A ghost that holds nothing and tells of everything.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Ghost::checking(config, &Checks::default())
    }

    /// A ghost that holds nothing; it tells of what counts, and goes on past what is wrong besides.
    #[must_use]
    pub fn checking(config: &Config, checks: &Checks) -> Self {
        let size = config.groups.iter().map(|group| group.block_size).max().unwrap_or(1) as usize;
        let num_places = config.num_blocks as usize + config.num_host_blocks as usize + 1;
        Ghost {
            groups: config.groups.clone(),
            checks: checks.clone(),
            num_blocks: config.num_blocks as usize,
            num_places,
            size,
            num_nulls: u32::from(config.null_block),
            has_tails: config.has_tails(),
            contents: vec![Content::Unknown; num_places * size],
            tables: Vec::new(),
            marks: vec![Marks::default(); config.num_blocks as usize],
            loads: Vec::new(),
            epoch: 0,
            nodes: Vec::new(),
        }
    }

    /// Hold exactly what a state counts on, and its tables and owners.
    pub fn assume(
        &mut self,
        state: &State,
        schedule: &Schedule,
        prefixes: &mut Prefixes,
    ) -> Checked {
        self.number(state, prefixes);
        self.contents.fill(Content::Unknown);
        self.loads.clear();
        let mut contents = std::mem::take(&mut self.contents);
        let found = self.expected(state, schedule, prefixes, |name, slot, content| {
            let held = std::mem::replace(&mut contents[slot], content);
            if held == Content::Unknown || held == content || !self.checks.count(name) {
                return Ok(());
            }
            Err(Violation::new(name, format!("slot {slot} is to hold {held:?} and {content:?}")))
        });
        self.contents = contents;
        let num_groups = self.groups.len();
        self.tables.resize_with(state.requests.len() * num_groups, Table::new);
        for (at, mirrored) in self.tables.iter_mut().enumerate() {
            let request = state.requests[at / num_groups].as_ref();
            let table = request.map_or(&[][..], |request| &request.tables[at % num_groups]);
            mirrored.clear();
            mirrored.extend_from_slice(table);
        }
        self.assume_owners(state);
        found
    }

    /// Hold that a state's owners are what follows from the commands.
    pub(crate) fn assume_owners(&mut self, state: &State) {
        for (block, marks) in (0..).map(BlockId).zip(&mut self.marks) {
            *marks = owner(state, block);
        }
    }

    /// Fails unless a state finds what it counts on, its batch executed.
    pub fn check(
        &mut self,
        state: &State,
        schedule: &Schedule,
        prefixes: &mut Prefixes,
    ) -> Checked {
        self.number(state, prefixes);
        self.check_numbered(state, schedule, prefixes)
    }

    /// The same, if the positions of the requests have their numbers.
    pub(crate) fn check_numbered(
        &mut self,
        state: &State,
        schedule: &Schedule,
        prefixes: &mut Prefixes,
    ) -> Checked {
        self.expected(state, schedule, prefixes, |name, slot, content| {
            self.find(name, slot, content, content)
        })?;
        let num_rows = self.tables.len().div_ceil(self.groups.len()).max(state.requests.len());
        for row in 0..num_rows {
            let request = state.requests.get(row).and_then(Option::as_ref);
            for index in 0..self.groups.len() {
                let table = request.map_or(&[][..], |request| &request.tables[index]);
                let mirrored = self.table(row, index);
                if mirrored != table && self.checks.count("TABLE-MIRROR") {
                    let place = format!("row {row} of group {index}");
                    let detail = format!("{place}: {mirrored:?} after the deltas, not {table:?}");
                    return Err(Violation::new("TABLE-MIRROR", detail));
                }
            }
        }
        self.settle_evicted(state);
        for (block, marks) in (0..).map(BlockId).zip(&self.marks) {
            let (found, marks) = (owner(state, block), Marks { empty: false, ..*marks });
            if found != marks && self.checks.count("OWNER-MIRROR") {
                let detail = format!("{block:?}: {marks:?} by the commands, not {found:?}");
                return Err(Violation::new("OWNER-MIRROR", detail));
            }
        }
        Ok(())
    }

    /// Number the prefixes of a state's requests.
    pub(crate) fn number(&mut self, state: &State, prefixes: &mut Prefixes) {
        for (row, request) in (0..).map(Row).zip(&state.requests) {
            if request.is_some() {
                self.set_nodes(row, state, prefixes);
            }
        }
    }

    /// What a state counts on: property, place in the contents, and content of all computed and
    /// cached slots, scheduled drafts included.
    fn expected(
        &self,
        state: &State,
        schedule: &Schedule,
        prefixes: &mut Prefixes,
        mut see: impl FnMut(&'static str, usize, Content) -> Checked,
    ) -> Checked {
        for (row, request) in (0..).map(Row).zip(&state.requests) {
            let Some(request) = request else { continue };
            for (tier, tables) in
                [(Tier::Device, &request.tables[..]), (Tier::Host, &request.host_tables[..])]
            {
                for (index, table) in tables.iter().enumerate().filter(|each| !each.1.is_empty()) {
                    let group = &self.groups[index];
                    let end = schedule.loading(row).unwrap_or(request.num_computed);
                    if group.is_state() {
                        self.expected_states(state, row, (tier, index, table), end, &mut see)?;
                        continue;
                    }
                    let held = self.held(row, index, end, schedule);
                    let seen = skipped_tokens(group, request.num_accepted());
                    for (position, content) in held {
                        let place = (tier, block_at(table, position / group.block_size)?);
                        if position >= seen || !self.is_null(place) {
                            see("KV-READ", self.slot(place, index, position), content)?;
                        }
                    }
                }
            }
        }
        for (block, key) in keyed(state) {
            let first = self.first_slot((Tier::Device, block));
            for (slot, &node) in prefixes.block(key, state.epoch)?.iter().enumerate() {
                see(self.of_key(key), first + slot, Content::Prefix(node, key.group_id() as u8))?;
            }
        }
        for (key, blocks) in state.device.tails.iter().flat_map(|tails| tails.keyed()) {
            for (slot, &node) in prefixes.tail(key, state.epoch)?.iter().enumerate() {
                for &block in blocks {
                    let slot = self.first_slot((Tier::Device, block)) + slot;
                    see("CACHE-KV", slot, Content::Prefix(node, key.group_id() as u8))?;
                }
            }
        }
        for owed in state.in_flight.iter().flat_map(|batch| &batch.owed) {
            let slot = self.first_slot((Tier::Device, owed.block));
            for &node in prefixes.block(&owed.key, state.epoch)? {
                see("STATE-KEY", slot, Content::Prefix(node, owed.key.group_id() as u8))?;
            }
        }
        Ok(())
    }

    /// What the positions of a request below a count hold in a group, or its encoder's tokens.
    pub(crate) fn held(
        &self,
        row: Row,
        group_id: usize,
        end: u32,
        schedule: &Schedule,
    ) -> impl Iterator<Item = (u32, Content)> + use<'_> {
        let is_cross = self.groups[group_id].is_cross();
        let encoder = if is_cross { schedule.encoder(row) } else { None };
        let nodes: &[u32] = if is_cross { &[] } else { &self.nodes[row.index()] };
        let nodes = &nodes[..nodes.len().min(end as usize)];
        let nodes = nodes.iter().map(move |&node| Content::Prefix(node, group_id as u8));
        (0..).zip(nodes.chain(encoded(encoder, group_id)))
    }

    /// Fails unless a slot holds this or that.
    pub(crate) fn find(
        &self,
        name: &'static str,
        slot: usize,
        content: Content,
        also: Content,
    ) -> Checked {
        let held = self.contents[slot];
        if held != Content::Unknown && (held == content || held == also) {
            return Ok(());
        }
        let spoilt = held == Content::Spoilt && self.checks.count("LOAD-FAILED");
        if !spoilt && !self.checks.count(name) {
            return Ok(());
        }
        let name = if spoilt { "LOAD-FAILED" } else { name };
        let (block, slot) = (slot / self.size, slot % self.size);
        let (tier, block) = match block.checked_sub(self.num_blocks) {
            Some(block) => ("host", block),
            None => ("device", block),
        };
        let detail = format!("{tier} block {block} slot {slot} holds {held:?}, not {content:?}");
        Err(Violation::new(name, detail))
    }

    /// The block of a position, by the table that the commands made.
    pub(crate) fn place(
        &self,
        row: Row,
        group_id: usize,
        position: u32,
    ) -> Result<TierBlock, Violation> {
        let table = self.table(row.index(), group_id);
        Ok((Tier::Device, block_at(table, position / self.groups[group_id].block_size)?))
    }

    pub(crate) fn table(&self, row: usize, group_id: usize) -> &[BlockId] {
        self.tables.get(row * self.groups.len() + group_id).map_or(&[], |table| table)
    }

    pub(crate) fn is_null(&self, (tier, block): TierBlock) -> bool {
        if tier == Tier::Device { block.0 < self.num_nulls } else { block == NO_HOST_BLOCK }
    }

    /// The slot of a position in its block.
    pub(crate) fn slot(&self, place: TierBlock, group_id: usize, position: u32) -> usize {
        self.first_slot(place) + (position % self.groups[group_id].block_size) as usize
    }

    /// The place of a block's first slot.
    pub(crate) fn first_slot(&self, (tier, block): TierBlock) -> usize {
        let place = match tier {
            Tier::Device => block.index(),
            Tier::Host => self.num_blocks + block.index(),
        };
        place.min(self.num_places - 1) * self.size
    }
}

/// A table's block at a position. Fails with KV-READ if there is none.
pub(crate) fn block_at(table: &[BlockId], position: u32) -> Result<BlockId, Violation> {
    table.get(position as usize).copied().ok_or_else(|| {
        let detail = format!("a table of {} blocks has no position {position}", table.len());
        Violation::new("KV-READ", detail)
    })
}

/// What an encoder's tokens hold in a group.
pub(crate) fn encoded(
    encoder: Option<&Encoder>,
    group_id: usize,
) -> impl Iterator<Item = Content> + use<> {
    let (number, count) = encoder.map_or((0, 0), |encoder| (encoder.number, encoder.num_tokens));
    std::iter::repeat_n(Content::Encoded(number, group_id as u8), count as usize)
}

/// What a state says of a block.
fn owner(state: &State, block: BlockId) -> Marks {
    let owned = state.device.ref_count(block) > 0;
    Marks { owned, cached: !owned && state.device.has_key(block), ..Marks::default() }
}

/// The device blocks that have a key, and it.
fn keyed(state: &State) -> impl Iterator<Item = (BlockId, &Key)> {
    let blocks = (0..state.device.num_blocks()).map(BlockId);
    blocks.filter_map(|block| Some((block, state.device.key(block)?)))
}
