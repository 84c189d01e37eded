// SPDX-License-Identifier: Apache-2.0
//! Keys that come, or leave, many at a time, and what is prefetched. A part of hash_index.rs.
//!
//! Why: the buckets of all of them are prefetched before the first one is read. The loops for keys
//! that are alone keep the columns in registers; any other key is left to the methods for one.

use super::{HashIndex, Place, SEVERAL};
use crate::pool::block_pool::AHEAD;
use crate::pool::prefetch::prefetch;
use crate::types::ids::BlockId;
use crate::types::keys::{BlockHash, Key, make_key};

/// The places of the keys of a run of blocks.
pub(crate) type Places = [Place; AHEAD];

impl HashIndex {
    /// Prefetch what determines a block's key.
    #[inline]
    pub(crate) fn prefetch_key(&self, block: BlockId) {
        prefetch(&self.keys, block.index());
        prefetch(&self.links, self.behind(block.0 + 1));
    }

    /// Prefetch the bucket of keys with this head, and return their place.
    #[inline]
    pub(crate) fn prefetch_bucket(&self, head: u64) -> Place {
        let place = self.place_of_head(head);
        prefetch(&self.links, place.bucket as usize);
        place
    }

    /// Return the places of the keys of the first `AHEAD` hashes, and prefetch them.
    pub(crate) fn places_of(&self, hashes: &[BlockHash], group_id: u32) -> Places {
        let mut places = Places::default();
        for (place, hash) in places.iter_mut().zip(hashes) {
            *place = self.prefetch_bucket(Key::head_of(hash, group_id));
        }
        places
    }

    /// The same of the keys of the first `AHEAD` blocks, which have or had one.
    pub(crate) fn places_of_blocks(&self, blocks: &[BlockId]) -> Places {
        let mut places = Places::default();
        for (place, &block) in places.iter_mut().zip(blocks) {
            if let Some(key) = self.keys.get(block.index()) {
                *place = self.prefetch_bucket(key.head());
            }
        }
        places
    }

    /// Do as `insert` for at most `AHEAD` blocks and their hashes, in order.
    pub(crate) fn insert_run(
        &mut self,
        places: &Places,
        blocks: &[BlockId],
        hashes: &[BlockHash],
        group_id: u32,
    ) {
        let mut done = 0;
        while done < blocks.len() {
            let places = &places[done..];
            done += self.insert_alone(places, &blocks[done..], &hashes[done..], group_id);
            if let Some(&block) = blocks.get(done) {
                self.insert(make_key(&hashes[done], group_id), block);
                done += 1;
            }
        }
    }

    /// Insert blocks up to the first one whose bucket may hold its key; returns how many.
    fn insert_alone(
        &mut self,
        places: &[Place],
        blocks: &[BlockId],
        hashes: &[BlockHash],
        group_id: u32,
    ) -> usize {
        let HashIndex { keys, links, num_buckets, named, num_ended, ended_before, length, .. } =
            self;
        let (num_buckets, named) = (*num_buckets, *named);
        let behind = |link: u32| num_buckets + (link & named) as usize;
        let mut num_done = 0;
        for ((&block, hash), &Place { bucket, tag }) in blocks.iter().zip(hashes).zip(places) {
            let head = links[bucket as usize];
            let second = links[behind(head)];
            let fits = |link: u32| (link ^ tag) & !(SEVERAL | named) == 0;
            let Some(key) = keys.get_mut(block.index()) else { break };
            if fits(head) || fits(second) || links[behind(second)] & named != 0 {
                break;
            }
            *key = make_key(hash, group_id);
            if *num_ended > 0 {
                ended_before[block.index()] = *num_ended;
            }
            links[num_buckets + block.index() + 1] = head;
            links[bucket as usize] = tag | (block.0 + 1);
            num_done += 1;
        }
        *length += num_done;
        num_done as usize
    }

    /// Do as `remove` for at most `AHEAD` blocks of this epoch, in order. announce: called with
    /// each key that no block has any more; None if nobody wants to know.
    pub(crate) fn remove_run(
        &mut self,
        places: &Places,
        blocks: &[BlockId],
        mut announce: Option<&mut dyn FnMut(&Key)>,
    ) {
        let mut done = 0;
        while done < blocks.len() {
            if announce.is_none() {
                done += self.remove_alone(&places[done..], &blocks[done..]);
            }
            let Some(&block) = blocks.get(done) else { return };
            if self.remove_at(places[done], block)
                && let Some(announce) = &mut announce
            {
                announce(self.key(block));
            }
            done += 1;
        }
    }

    /// Remove blocks up to the first one that is not alone under its key, or stands behind two
    /// others in its bucket; returns how many.
    fn remove_alone(&mut self, places: &[Place], blocks: &[BlockId]) -> usize {
        let HashIndex { links, num_buckets, named, length, .. } = self;
        let (num_buckets, named) = (*num_buckets, *named);
        let mut num_done = 0;
        for (&block, &Place { bucket, tag }) in blocks.iter().zip(places) {
            let own = tag | (block.0 + 1);
            let head = links[bucket as usize];
            let behind = num_buckets + (head & named) as usize;
            let place = if head == own { bucket as usize } else { behind };
            let next = links[num_buckets + block.index() + 1];
            let link = &mut links[place];
            if *link & !SEVERAL != own || next & SEVERAL != 0 {
                break;
            }
            *link = *link & SEVERAL | next;
            num_done += 1;
        }
        *length -= num_done;
        num_done as usize
    }
}
