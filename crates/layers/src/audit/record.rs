//! One record, decoded.

use std::net::IpAddr;
use std::sync::Arc;

use dray_core::{Errno, FileId, NodeId, Peer, SessionId};

use super::kind::AuditKind;

/// Groups of a caller that a record names at most.
pub const GROUPS_MAX: usize = 64;

/// A text of bytes, shared by records that have the same.
pub type Text = Arc<[u8]>;

/// The caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct AuditUser {
    /// As the client names the user.
    pub uid: u32,
    /// As above.
    pub gid: u32,
    /// Supplementary groups, [`GROUPS_MAX`] at most.
    pub groups: Vec<u32>,
    /// How many groups there are besides.
    pub groups_left_out: u32,
    /// The batch job; may be empty.
    pub job: String,
}

/// The address of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AuditPeer {
    /// No connection brought the call.
    #[default]
    None,
    /// A host on the network.
    Ip(IpAddr),
    /// A process on the server's machine.
    Local,
}

impl From<Peer> for AuditPeer {
    fn from(peer: Peer) -> AuditPeer {
        match peer {
            Peer::Ip(address) => AuditPeer::Ip(address.ip().to_canonical()),
            Peer::Local | Peer::User(..) => AuditPeer::Local,
        }
    }
}

/// The client node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AuditClient {
    /// The node as its mount numbers it.
    pub node: NodeId,
    /// The session at this server.
    pub session: SessionId,
    /// Where it came from.
    pub peer: AuditPeer,
}

/// What moved through an open file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditTotals {
    /// Bytes read.
    pub read_bytes: u64,
    /// Calls that read.
    pub reads: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Calls that wrote.
    pub writes: u64,
}

/// What a call set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditSet {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size, bytes.
    pub size: Option<u64>,
}

/// Records that are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditGap {
    /// How many; 0: nobody knows.
    pub records: u64,
    /// Why, in words.
    pub why: String,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRecord {
    /// The record's number in the log, without holes.
    pub index: u64,
    /// Microseconds since 1970, at the end of the call.
    pub time_us: u64,
    /// What happened.
    pub kind: AuditKind,
    /// How it ended; none: it succeeded.
    pub error: Option<Errno>,
    /// The file.
    pub id: Option<FileId>,
    /// The file's path, from the root of the export on, when the record was written; of a rename the old.
    pub path: Option<Text>,
    /// The directory of the name.
    pub parent: Option<FileId>,
    /// The name; of a rename the old one.
    pub name: Option<Text>,
    /// Where a rename leads to.
    pub to_parent: Option<FileId>,
    /// The new name.
    pub to_name: Option<Text>,
    /// The new path.
    pub to_path: Option<Text>,
    /// The caller.
    pub user: Arc<AuditUser>,
    /// The client.
    pub client: AuditClient,
    /// Flags of open(2).
    pub open_flags: Option<u32>,
    /// The name of an extended attribute.
    pub xattr: Option<Text>,
    /// What moved, of a close.
    pub totals: Option<AuditTotals>,
    /// What was set.
    pub set: Option<AuditSet>,
    /// Bytes of a copy or an allocation.
    pub bytes: u64,
    /// A server made the change before it was killed; there may be another record of it.
    pub repeated: bool,
    /// What is missing, of a gap.
    pub gap: Option<AuditGap>,
}

impl AuditRecord {
    /// One of which only this is known.
    pub fn new(kind: AuditKind, time_us: u64) -> AuditRecord {
        AuditRecord {
            index: 0,
            time_us,
            kind,
            error: None,
            id: None,
            path: None,
            parent: None,
            name: None,
            to_parent: None,
            to_name: None,
            to_path: None,
            user: Arc::default(),
            client: AuditClient::default(),
            open_flags: None,
            xattr: None,
            totals: None,
            set: None,
            bytes: 0,
            repeated: false,
            gap: None,
        }
    }

    /// A record that says that others are missing.
    pub fn gap(time_us: u64, records: u64, why: &str) -> AuditRecord {
        let gap = Some(AuditGap { records, why: why.to_owned() });
        AuditRecord { gap, ..AuditRecord::new(AuditKind::Gap, time_us) }
    }

    /// Whether the caller was refused for want of rights.
    pub fn is_denied(&self) -> bool {
        self.error.is_some_and(is_denied)
    }
}

/// Whether an error says that the caller may not.
pub fn is_denied(errno: Errno) -> bool {
    matches!(errno, Errno::EACCES | Errno::EPERM | Errno::EROFS)
}

fn slash_behind(parent: &[u8]) -> &'static [u8] {
    if parent.ends_with(b"/") { b"" } else { b"/" }
}

/// Paths up to so many bytes are put together on the stack: each record has one.
const SHORT_MAX_BYTES: usize = 256;

/// `name` in the directory `parent`.
pub(super) fn joined(parent: &[u8], name: &[u8]) -> Text {
    let parts = [parent, slash_behind(parent), name];
    let (mut short, mut end) = ([0; SHORT_MAX_BYTES], 0);
    for part in parts {
        let Some(place) = short.get_mut(end..end + part.len()) else {
            return parts.concat().into();
        };
        place.copy_from_slice(part);
        end += part.len();
    }
    Text::from(&short[..end])
}

/// Whether `path` is that of `name` in the directory `parent`.
pub(super) fn is_joined(path: &[u8], parent: &[u8], name: &[u8]) -> bool {
    let rest = path.strip_prefix(parent).and_then(|rest| rest.strip_prefix(slash_behind(parent)));
    rest == Some(name)
}
