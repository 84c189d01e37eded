// SPDX-License-Identifier: Apache-2.0
//! Numbers prefixes: equal numbers mean equal content, whatever the hashes are.
//!
//! No transition calls anything here. The keys and values of a position depend on the tokens up to
//! it, the adapter, and the media items or embedding in its place; the salt decides which requests
//! may share them, and so does the epoch if it is above 0. Together these are its identity.
//! A hash stands for one identity, that of the first request with it. All workers of a search share
//! one tree; each keeps the part that it has met, so that it seldom takes the lock. Twin:
//! kvcore/oracle/prefixes.py.

mod by_hash;
mod letters;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use rustc_hash::FxBuildHasher;
use smallvec::SmallVec;

use crate::oracle::prefixes::by_hash::ByHash;
use crate::oracle::prefixes::letters::{Chain, Extra, Letter, extras};
use crate::state::state::{RequestState, State};
use crate::types::config::Config;
use crate::types::groups::Group;
use crate::types::keys::{BlockHash, Key};
use crate::types::violation::Violation;

/// The properties that this file checks.
pub const PREFIX_PROPERTIES: [&str; 3] = ["HASH-INJ", "KEY-SEP", "KEY-GRAN"];

/// Numbers of a request's positions.
pub type Numbers = SmallVec<[u32; 16]>;

type Map<K, V> = HashMap<K, V, FxBuildHasher>;

/// Letters from here on stand for more than a token.
const FIRST_EXTRA: Letter = 1 << 31;
/// Letters below this, which small worlds have alone, are found by place.
const NUM_NEAR: usize = 4;

/// What all workers know together.
#[derive(Debug, Default)]
struct Tree {
    children: Map<(u32, Letter), u32>,
    /// By the numbers of prefixes and one less: the prefix one letter shorter.
    parents: Vec<u32>,
    chains: ByHash<Arc<Chain>>,
    /// By their numbers.
    hashes: Vec<BlockHash>,
    extras: Map<Extra, Letter>,
}

/// The tree of all prefixes seen so far, and the identity of each hash.
#[derive(Debug, Clone)]
pub struct Prefixes {
    hash_block_size: u32,
    block_sizes: Vec<u32>,
    /// Whether blocks of a group hold one state, not tokens.
    is_state: Vec<bool>,
    /// By prefix and near letter: the prefix with this letter, 0 if it was not met.
    near: Vec<[u32; NUM_NEAR]>,
    /// Those with other letters.
    children: Map<(u32, Letter), u32>,
    parents: Vec<u32>,
    chains: ByHash<Arc<Chain>>,
    hashes: Vec<BlockHash>,
    /// By prefix: a hash that was found to stand for it.
    learnt: Vec<Option<BlockHash>>,
    /// Of the block that was asked for last, of an epoch above 0.
    of_epoch: Numbers,
    tree: Arc<Mutex<Tree>>,
}

impl Prefixes {
    /// A tree of the empty prefix. A clone is of the same tree, for another worker.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Prefixes {
            hash_block_size: config.hash_block_size(),
            block_sizes: config.groups.iter().map(|group| group.block_size).collect(),
            is_state: config.groups.iter().map(Group::is_state).collect(),
            near: Vec::new(),
            children: Map::default(),
            parents: Vec::new(),
            chains: ByHash::default(),
            hashes: Vec::new(),
            learnt: Vec::new(),
            of_epoch: Numbers::new(),
            tree: Arc::default(),
        }
    }

    /// Return the number of the prefix that ends at each token and draft of a request. epoch: in
    /// which it began to compute.
    pub fn nodes(&mut self, request: &RequestState, epoch: u32) -> Numbers {
        let mut nodes = Numbers::new();
        self.nodes_into(request, epoch, &mut nodes);
        nodes
    }

    /// The same, in the room of other numbers.
    pub(crate) fn nodes_into(&mut self, request: &RequestState, epoch: u32, nodes: &mut Numbers) {
        if request.extra_keys.is_some() {
            let letters = self.letters(request);
            return self.number_into(letters.into_iter(), epoch, nodes);
        }
        self.number_into(request.tokens.iter().chain(&request.drafts).copied(), epoch, nodes);
    }

    /// What each token and draft of a request adds to its prefix.
    pub fn letters(&mut self, request: &RequestState) -> Numbers {
        let tokens = request.tokens.iter().chain(&request.drafts).copied();
        let Some(extra_keys) = &request.extra_keys else { return tokens.collect() };
        let all: Vec<u32> = tokens.collect();
        let extras = extras(&all, extra_keys, self.hash_block_size);
        extras.into_iter().map(|extra| self.letter(extra)).collect()
    }

    /// Take in what the requests' hashes stand for, except hashes behind the tokens, which REQ-HASH
    /// reports. Fails with HASH-INJ, KEY-SEP.
    pub fn learn(&mut self, state: &State) -> Result<(), Violation> {
        let size = self.hash_block_size as usize;
        for request in state.requests().filter(|each| !each.block_hashes.is_empty()) {
            let with_extras = request.extra_keys.is_some().then(|| self.letters(request));
            let letters = with_extras.as_deref().unwrap_or(&request.tokens);
            let mut node = 0;
            for (at, hash) in request.block_hashes.iter().enumerate() {
                let end = (at + 1) * size;
                let Some(block) = letters.get(at * size..end) else { break };
                for &letter in block {
                    node = self.child(node, letter);
                }
                if self.learnt.get(node as usize) != Some(&Some(*hash)) {
                    self.learn_one(request, hash, &letters[..end])?;
                }
            }
        }
        Ok(())
    }

    /// Take in that a hash stands for the first prefixes of a request.
    #[cold]
    fn learn_one(
        &mut self,
        request: &RequestState,
        hash: &BlockHash,
        letters: &[Letter],
    ) -> Result<(), Violation> {
        let nodes = self.number(letters);
        let (end, last) = (nodes.len(), nodes[nodes.len() - 1]);
        let known = match self.chains.get(hash) {
            Some(known) => known,
            None => self.meet(hash, &request.tokens[..end], letters, &nodes),
        };
        if known.tokens.len() != end || known.last() != last {
            return Err(collision(hash, known, &request.tokens[..end]));
        }
        if self.learnt.len() <= last as usize {
            self.learnt.resize(last as usize + 1, None);
        }
        self.learnt[last as usize] = Some(*hash);
        Ok(())
    }

    /// What a block under a key ends. Fails with NOCRASH if no request had its hash.
    pub fn chain(&mut self, key: &Key) -> Result<&Chain, Violation> {
        match self.chains.entry(key.block_hash()) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => match lock(&self.tree).chains.get(place.key()) {
                Some(known) => Ok(place.insert(Arc::clone(known))),
                None => Err(Violation::new("NOCRASH", "a key is of no known request".to_owned())),
            },
        }
    }

    /// The number of a hash that some request carried.
    pub fn hash_number(&mut self, hash: &BlockHash) -> u32 {
        if let Some(known) = self.chains.get(hash) {
            return known.number;
        }
        self.tree().chains[hash].number
    }

    /// The hash of a number.
    pub fn hash_of(&mut self, number: u32) -> BlockHash {
        if number as usize >= self.hashes.len() {
            let hashes = self.tree().hashes.clone();
            self.hashes = hashes;
        }
        self.hashes[number as usize]
    }

    /// The prefixes that a block under a key of an epoch holds; a state is of one. Fails with
    /// KEY-GRAN.
    pub fn block(&mut self, key: &Key, epoch: u32) -> Result<&[u32], Violation> {
        let group_id = key.group_id();
        let is_state = self.is_state[group_id as usize];
        let size = if is_state { 1 } else { self.block_sizes[group_id as usize] as usize };
        let nodes = self.nodes_of(key, epoch)?;
        let end = nodes.len();
        if !end.is_multiple_of(size) {
            let detail =
                format!("a key of group {group_id} ends at token {end}, blocks hold {size}");
            return Err(Violation::new("KEY-GRAN", detail));
        }
        Ok(&nodes[end - size..])
    }

    /// The prefixes that a block holds up to the end of a tail key of an epoch. Fails with
    /// KEY-GRAN.
    pub fn tail(&mut self, key: &Key, epoch: u32) -> Result<&[u32], Violation> {
        let group_id = key.group_id();
        let is_state = self.is_state[group_id as usize];
        let size = self.block_sizes[group_id as usize] as usize;
        let nodes = self.nodes_of(key, epoch)?;
        let (end, num_inside) = (nodes.len(), nodes.len() % size);
        if num_inside == 0 || is_state {
            let detail =
                format!("a tail key of group {group_id} ends at token {end}, blocks hold {size}");
            return Err(Violation::new("KEY-GRAN", detail));
        }
        Ok(&nodes[end - num_inside..])
    }

    /// The prefixes up to the end of a key of an epoch.
    fn nodes_of(&mut self, key: &Key, epoch: u32) -> Result<&[u32], Violation> {
        if epoch > 0 {
            let letters = self.chain(key)?.letters.clone();
            self.of_epoch = self.number_in(&letters, epoch);
            return Ok(&self.of_epoch);
        }
        Ok(&self.chain(key)?.nodes)
    }

    /// The numbers of the prefixes that these letters make, one after the other.
    pub fn number(&mut self, letters: &[Letter]) -> Numbers {
        self.number_in(letters, 0)
    }

    /// The same, if they begin in an epoch.
    pub fn number_in(&mut self, letters: &[Letter], epoch: u32) -> Numbers {
        let mut numbers = Numbers::new();
        self.number_into(letters.iter().copied(), epoch, &mut numbers);
        numbers
    }

    fn number_into(
        &mut self,
        letters: impl Iterator<Item = Letter>,
        epoch: u32,
        numbers: &mut Numbers,
    ) {
        numbers.clear();
        let mut node = if epoch == 0 { 0 } else { self.child(0, Letter::MAX - epoch) };
        letters.for_each(|letter| {
            node = self.child(node, letter);
            numbers.push(node);
        });
    }

    /// The numbers of the prefixes that lead to one, itself the last.
    pub fn path(&mut self, mut node: u32) -> Numbers {
        let mut path = Numbers::new();
        while node > 0 {
            path.push(node);
            if node as usize > self.parents.len() {
                let parents = self.tree().parents.clone();
                self.parents = parents;
            }
            node = self.parents[node as usize - 1];
        }
        path.reverse();
        path
    }

    fn child(&mut self, node: u32, letter: Letter) -> u32 {
        let near = self.near.get(node as usize).and_then(|all| all.get(letter as usize));
        near.copied().filter(|&child| child > 0).unwrap_or_else(|| self.far_child(node, letter))
    }

    #[cold]
    fn far_child(&mut self, node: u32, letter: Letter) -> u32 {
        if let Some(&known) = self.children.get(&(node, letter)) {
            return known;
        }
        let mut tree = self.tree();
        let next = tree.children.len() as u32 + 1;
        let number = *tree.children.entry((node, letter)).or_insert(next);
        if number == next {
            tree.parents.push(node);
        }
        drop(tree);
        if letter as usize >= NUM_NEAR {
            self.children.insert((node, letter), number);
            return number;
        }
        if self.near.len() <= node as usize {
            self.near.resize(node as usize + 1, [0; NUM_NEAR]);
        }
        self.near[node as usize][letter as usize] = number;
        number
    }

    fn letter(&mut self, extra: Extra) -> Letter {
        if extra.lora.is_none()
            && extra.salt.is_none()
            && extra.media.is_empty()
            && extra.row.is_none()
        {
            return extra.token;
        }
        let mut tree = self.tree();
        let next = FIRST_EXTRA + tree.extras.len() as Letter;
        *tree.extras.entry(extra).or_insert(next)
    }

    /// What a hash stands for: what another worker knows, or else these tokens.
    fn meet(
        &mut self,
        hash: &BlockHash,
        tokens: &[u32],
        letters: &[Letter],
        nodes: &[u32],
    ) -> &Chain {
        let mut tree = self.tree();
        let Tree { chains, hashes, .. } = &mut *tree;
        let known = chains.entry(*hash).or_insert_with(|| {
            hashes.push(*hash);
            Arc::new(Chain {
                tokens: tokens.to_vec(),
                letters: letters.to_vec(),
                nodes: nodes.to_vec(),
                number: hashes.len() as u32 - 1,
            })
        });
        let known = Arc::clone(known);
        drop(tree);
        self.chains.entry(*hash).or_insert(known)
    }

    fn tree(&self) -> MutexGuard<'_, Tree> {
        lock(&self.tree)
    }
}

fn lock(tree: &Mutex<Tree>) -> MutexGuard<'_, Tree> {
    tree.lock().unwrap_or_else(PoisonError::into_inner)
}

fn collision(hash: &BlockHash, known: &Chain, tokens: &[u32]) -> Violation {
    let property = if known.tokens == tokens { "KEY-SEP" } else { "HASH-INJ" };
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    Violation::new(property, format!("{digits} stands twice"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::state::make_state;
    use crate::transitions::requests::add_request;
    use crate::types::values::Request;

    #[test]
    fn equal_prefixes_have_equal_numbers_for_every_worker() {
        let config = Config::new(5, 2, b"seed");
        let mut state = make_state(config.clone()).unwrap();
        for (id, tokens) in [("0", [1, 2, 3]), ("1", [1, 2, 4])] {
            add_request(&mut state, Request::new(id, &tokens)).unwrap();
        }
        let mut prefixes = Prefixes::new(&config);
        let mut other = prefixes.clone();
        prefixes.learn(&state).unwrap();
        let requests: Vec<&RequestState> = state.requests().collect();
        let nodes = [prefixes.nodes(requests[0], 0), prefixes.nodes(requests[1], 0)];
        assert_eq!(nodes[0][..2], nodes[1][..2]);
        assert_ne!(nodes[0][2], nodes[1][2]);
        assert_eq!(other.nodes(requests[1], 0), nodes[1]);
        let key = requests[0].key(1, 0, 0);
        assert_eq!(other.block(&key, 0), Ok(&nodes[0][..2]));
    }

    #[test]
    fn a_hash_that_stands_for_two_prefixes_is_found() {
        let config = Config::new(5, 2, b"seed");
        let mut state = make_state(config.clone()).unwrap();
        let row = add_request(&mut state, Request::new("0", &[1, 2])).unwrap();
        let mut prefixes = Prefixes::new(&config);
        prefixes.learn(&state).unwrap();
        state[row].tokens[1] = 3;
        assert_eq!(prefixes.learn(&state).unwrap_err().property, "HASH-INJ");
    }
}
