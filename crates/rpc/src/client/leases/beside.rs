//! Leases of several servers on one file (ADR 0056).
//!
//! The servers of a projection share a file system. Each leases what it owns, and recalls what it changes. The owner of
//! a file leases its attributes. But a name of the file may be removed, or moved, at the server that owns the
//! directory. That changes the file's attributes, and the owner does not hear of it.
//!
//! So attributes are believed while both have leased them: the owner, and the server by whose lookup the file's
//! only name was found. That server recalls them from everybody before it changes the name. What the owner said has to
//! be asked for behind that lookup: what was changed before it, that server recalls from nobody.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

use dray_core::{FileId, FileType, Ttl};

use super::keys::AnswerKey;
use super::recent::ChangeMoment;
use super::{Leased, LeasedAttributes};

/// Says which of the servers owns a file, by its number.
type OwnerOf = Box<dyn Fn(FileId) -> usize + Send + Sync>;

/// The sessions of one mount with servers that share a file system and lease what they own.
pub struct LeaseGroup {
    owner_of: OwnerOf,
    /// The root has no name that a server could change.
    root: OnceLock<FileId>,
    /// All sessions count moments alike, so that those of two of them can be compared.
    moments: Arc<AtomicU64>,
    members: RwLock<Vec<Weak<Leased>>>,
}

impl fmt::Debug for LeaseGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseGroup").finish_non_exhaustive()
    }
}

impl LeaseGroup {
    /// `owner_of` says which server owns a file: its attributes, and if it is a directory its names.
    pub fn new(owner_of: impl Fn(FileId) -> usize + Send + Sync + 'static) -> Arc<LeaseGroup> {
        let (owner_of, moments) = (Box::new(owner_of), Arc::default());
        let (root, members) = (OnceLock::new(), RwLock::default());
        Arc::new(LeaseGroup { owner_of, root, moments, members })
    }

    /// The root of the file system, once it is known. Until then nothing of it is believed.
    pub fn set_root(&self, root: FileId) {
        let _ = self.root.set(root); // all servers have the same
    }

    fn join(&self, member: usize, leased: &Arc<Leased>) {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        if members.len() <= member {
            members.resize_with(member + 1, Weak::new);
        }
        members[member] = Arc::downgrade(leased); // the session before had met no server
    }
}

/// The place of a session in such a group.
#[derive(Clone, Debug)]
pub struct LeaseShare {
    /// All sessions of the mount.
    pub group: Arc<LeaseGroup>,
    /// The number of this session's server.
    pub member: usize,
}

impl LeaseShare {
    pub(super) fn moments(&self) -> Arc<AtomicU64> {
        self.group.moments.clone()
    }

    pub(super) fn join(&self, leased: &Arc<Leased>) {
        self.group.join(self.member, leased);
    }
}

/// What has to hold beside a session's own lease on attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beside {
    /// Nothing: there is one server, or the session's answers about this file serve names alone.
    Nothing,
    /// The server of the file's only name has leased them, too. If that is another server than this session's, this
    /// is since when and for how long.
    NamedBy(Option<(ChangeMoment, Ttl)>),
}

impl Leased {
    /// Whether the session's server owns a directory, and so leases its names. Another server may answer lookups there,
    /// too. But what it leases of them counts for nothing: it does not change them, and recalls nothing.
    pub(super) fn owns(&self, dir: FileId) -> bool {
        let Some(LeaseShare { group, member }) = &self.share else { return true };
        (group.owner_of)(dir) == *member
    }

    /// To be asked before the lock is taken by which attributes are remembered.
    pub(super) fn beside(&self, id: FileId) -> Beside {
        let Some(LeaseShare { group, member }) = &self.share else { return Beside::Nothing };
        if (group.owner_of)(id) != *member || group.root.get() == Some(&id) {
            return Beside::Nothing;
        }
        let members = group.members.read().unwrap_or_else(PoisonError::into_inner);
        let others = members.iter().enumerate().filter(|(other, _)| other != member);
        let named = others.filter_map(|(_, other)| other.upgrade()?.named(id));
        Beside::NamedBy(named.min_by_key(|(since, _)| *since))
    }

    /// Since when this session's server has leased attributes by the file's name, and for how long.
    fn named(&self, id: FileId) -> Option<(ChangeMoment, Ttl)> {
        let rest = self.rest()?;
        self.attributes.find(AnswerKey::of_attributes(id), |known| {
            let stands = known.id == id && self.changes.attributes_stand(known.asked);
            Some((known.named.filter(|_| stands)?, rest))
        })
    }
}

impl LeasedAttributes {
    /// For how long they may be believed, of the `rest` for which the session's leases hold.
    pub(super) fn believed(&self, beside: Beside, rest: Ttl) -> Option<Ttl> {
        let Beside::NamedBy(other) = beside else { return Some(rest) };
        let has_one_name = self.attr.nlink == 1 || self.attr.file_type() == FileType::Directory;
        if !has_one_name {
            return None;
        }
        if self.named.is_some() {
            return Some(rest);
        }
        other.filter(|(since, _)| *since <= self.asked).map(|(_, others)| rest.min(others))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dray_core::{Attr, Context, Entry, Name, Validity};
    use dray_rt::{DriverKind, Executor};

    use super::*;
    use crate::client::leases::{LeaseWish, LeasedAnswers};
    use crate::client::link::SessionState;

    const TERM: Duration = Duration::from_secs(5);
    const DIR: FileId = FileId { ino: 1, generation: 1 };
    const FILE: FileId = FileId { ino: 2, generation: 1 };

    /// Sessions with the server of the names in `DIR`, and with the home of `FILE`.
    fn simulate(test: impl FnOnce(LeasedAnswers, LeasedAnswers)) {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let group = LeaseGroup::new(|id| usize::from(id == FILE));
            group.set_root(FileId { ino: 9, generation: 1 });
            let [names, home] = [0, 1].map(|member| {
                let wish = LeaseWish::Yes { callers_are_checked: true, keeps_writes: false };
                let share = LeaseShare { group: group.clone(), member };
                let leases = LeasedAnswers::new(wish, false, Some(share));
                leases.welcomed(SessionState { session: 1, instance: 1 }, 0, TERM);
                leases.answered(leases.sent().unwrap());
                leases
            });
            test(names, home);
        });
    }

    fn leased() -> Attr {
        let time = Some(Ttl::of(TERM));
        let validity = Validity { name: time, attributes: time, pages: None };
        let mode = libc::S_IFREG | 0o644;
        Attr { ino: FILE.ino, mode, nlink: 1, validity, ..Attr::default() }
    }

    fn look_up(leases: &LeasedAnswers) -> Entry {
        let place = (&Context::system(), DIR, Name::new(b"f").unwrap());
        let answer = Entry { id: FILE, attr: leased() };
        leases.looked_up(leases.asking(), place, Ok(answer)).unwrap()
    }

    // proves: P272
    #[test]
    fn attributes_that_were_asked_for_before_the_name_are_not_believed() {
        simulate(|names, home| {
            let before = home.asking();
            look_up(&names);
            let attr = home.attributes(before, FILE, leased());
            assert_eq!(attr.validity.attributes, Some(Ttl::ZERO));
            assert!(home.getattr(FILE).is_none());
            let attr = home.attributes(home.asking(), FILE, leased());
            assert_ne!(attr.validity.attributes, Some(Ttl::ZERO));
            assert!(home.getattr(FILE).is_some());
        });
    }

    /// The home looks names up, too, to open files ahead.
    // proves: P272
    #[test]
    fn a_name_that_another_server_owns_is_not_believed() {
        simulate(|names, home| {
            let attr = look_up(&home).attr;
            assert_eq!(attr.validity.name, Some(Ttl::ZERO));
            assert_eq!(attr.validity.attributes, Some(Ttl::ZERO));
            let name = Name::new(b"f").unwrap();
            assert!(home.lookup(&Context::system(), DIR, name).is_none());
            assert!(home.getattr(FILE).is_none());
            look_up(&names);
            assert_ne!(look_up(&home).attr.validity.attributes, Some(Ttl::ZERO));
            assert!(home.getattr(FILE).is_some());
            assert!(home.lookup(&Context::system(), DIR, name).is_none());
        });
    }
}
