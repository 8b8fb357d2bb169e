//! What this server has heard from etcd.

use std::collections::{BTreeMap, BTreeSet};

use dray_rpc::server::{Revision, ServerNumber, SliceState};

use crate::keys::{KeyKind, Keys};
use crate::records::{self, MemberRecord, QuiesceRecord, QuietRecord};

/// The projection as this server heard of it last.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    /// The member of etcd that this server speaks to; none: none at the moment.
    pub etcd: Option<String>,
    /// Why there is none.
    pub trouble: Option<String>,
    /// The servers that are there.
    pub members: BTreeMap<ServerNumber, MemberRecord>,
    /// The servers that are to serve nothing.
    pub drained: BTreeSet<ServerNumber>,
    /// New calls wait at all servers.
    pub quiesced: Option<(QuiesceRecord, Revision)>,
    /// The servers at which no call is under way, each with the revision of the mark for which that is so.
    pub quiet: BTreeMap<ServerNumber, Revision>,
    /// Slices that somebody has served, by the names of their exports.
    pub slices: BTreeMap<String, (SliceState, Revision)>,
    /// Everything of before this revision of etcd has been heard.
    pub(crate) heard: u64,
    /// The state of the cluster has been heard as a whole at least once.
    pub(crate) is_whole: bool,
}

/// A value in etcd, with the revision at which it came.
pub(crate) struct EtcdEntry<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) value: &'a [u8],
    pub(crate) revision: u64,
}

impl ClusterView {
    /// Everything as it was at a revision. What this server has changed since then stays.
    pub(crate) fn replace<'a>(
        &mut self,
        keys: &Keys,
        entries: impl Iterator<Item = EtcdEntry<'a>>,
        revision: u64,
    ) {
        self.members.clear();
        self.drained.clear();
        self.quiesced = None;
        self.quiet.clear();
        self.slices.retain(|_, (_, known)| known.0 > revision);
        for entry in entries {
            self.put(keys, &entry);
        }
        (self.heard, self.is_whole) = (revision, true);
    }

    /// A value that came.
    pub(crate) fn put(&mut self, keys: &Keys, entry: &EtcdEntry<'_>) {
        let Some(kind) = keys.kind(entry.key) else { return };
        let complain = |why| log::error!("{}: {why}", String::from_utf8_lossy(entry.key));
        match kind {
            KeyKind::Definition => {}
            // That there is such a key counts, whatever stands there.
            KeyKind::Member(server) => {
                let member = records::read(entry.value).unwrap_or_else(|why| {
                    complain(why);
                    MemberRecord::default()
                });
                self.members.insert(server, member);
            }
            KeyKind::Drained(server) => {
                self.drained.insert(server);
            }
            KeyKind::Quiesced => {
                let record = records::read(entry.value).unwrap_or_default();
                self.quiesced = Some((record, Revision(entry.revision)));
            }
            KeyKind::Quiet(server) => match records::read(entry.value) {
                Ok(QuietRecord { quiesced }) => {
                    self.quiet.insert(server, Revision(quiesced));
                }
                Err(why) => {
                    complain(why);
                    self.quiet.remove(&server);
                }
            },
            KeyKind::Slice(name) => match records::read_slice(entry.value) {
                Ok(state) => self.put_slice(&name, state, Revision(entry.revision)),
                Err(why) => {
                    complain(why);
                    self.slices.remove(&name);
                }
            },
        }
    }

    /// The servers that are there and have calls under way, while all are to have none.
    pub fn not_quiet(&self) -> Vec<ServerNumber> {
        let Some((_, asked)) = &self.quiesced else { return Vec::new() };
        let waits = |server: &&ServerNumber| self.quiet.get(*server) != Some(asked);
        self.members.keys().filter(waits).copied().collect()
    }

    /// The state of a slice, unless a newer one is known.
    pub(crate) fn put_slice(&mut self, name: &str, state: SliceState, revision: Revision) {
        if self.slices.get(name).is_none_or(|(_, known)| *known < revision) {
            self.slices.insert(name.to_owned(), (state, revision));
        }
    }

    /// A value that went, at a revision.
    pub(crate) fn delete(&mut self, keys: &Keys, key: &[u8], revision: u64) {
        match keys.kind(key) {
            None | Some(KeyKind::Definition) => {}
            Some(KeyKind::Member(server)) => {
                self.members.remove(&server);
            }
            Some(KeyKind::Drained(server)) => {
                self.drained.remove(&server);
            }
            Some(KeyKind::Quiesced) => self.quiesced = None,
            Some(KeyKind::Quiet(server)) => {
                self.quiet.remove(&server);
            }
            Some(KeyKind::Slice(name)) => {
                if self.slices.get(&name).is_some_and(|(_, known)| known.0 <= revision) {
                    self.slices.remove(&name);
                }
            }
        }
    }

    /// A change of this server went well. What etcd has reported since then is newer.
    pub(crate) fn changed(&mut self, name: &str, state: SliceState, revision: Revision) {
        if revision.0 > self.heard {
            self.put_slice(name, state, revision);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::SliceRecord;
    use dray_rpc::server::PageCacheId;

    fn state(epoch: u64) -> SliceState {
        let primary = ServerNumber(0);
        let page_cache = PageCacheId::SYNCED;
        SliceState { primary, epoch, in_step: false, loss: 1, recovering: false, page_cache }
    }

    fn epoch(view: &ClusterView) -> Option<u64> {
        view.slices.get("x/0.1").map(|(state, _)| state.epoch)
    }

    #[test]
    fn an_older_state_never_hides_a_newer_one() {
        let keys = Keys::of("x");
        let key = keys.slice("x/0.1");
        let mut view = ClusterView::default();
        let put = |view: &mut ClusterView, number: u64, revision| {
            let text = records::written(SliceRecord::from(state(number)));
            view.put(&keys, &EtcdEntry { key: key.as_bytes(), value: text.as_bytes(), revision });
        };
        put(&mut view, 1, 10);
        view.changed("x/0.1", state(2), Revision(12));
        put(&mut view, 1, 11);
        assert_eq!(epoch(&view), Some(2), "the watch lags behind this server's own changes");
        view.replace(&keys, std::iter::empty(), 11);
        assert_eq!(epoch(&view), Some(2), "so does what was asked for before the change");
        view.delete(&keys, key.as_bytes(), 11);
        assert_eq!(epoch(&view), Some(2));
        view.delete(&keys, key.as_bytes(), 13);
        assert_eq!(epoch(&view), None);
        view.heard = 13;
        view.changed("x/0.1", state(2), Revision(12));
        assert_eq!(epoch(&view), None, "it went after the change");
    }

    #[test]
    fn of_what_is_unreadable_its_being_there_counts() {
        let keys = Keys::of("x");
        let mut view = ClusterView::default();
        for key in [keys.member(ServerNumber(1)), keys.slice("x/0.1"), keys.quiesced()] {
            view.put(&keys, &EtcdEntry { key: key.as_bytes(), value: b"{}", revision: 1 });
        }
        assert!(view.members.contains_key(&ServerNumber(1)) && view.quiesced.is_some());
        assert!(view.slices.is_empty());
    }
}
