//! The encoding of records in a segment. Most records have a small fraction of the bytes that
//! their fields would take:
//!
//! - times and inode numbers are differences to those before;
//! - files, callers and clients that were named not long ago are numbers of table slots;
//! - paths share the beginning of the path before, and a path that directory and name give is
//!   left out.
//!
//! The tables are the same at both ends, because both do the same with each record. They begin
//! empty with each segment, so that a segment can be read by itself.

use std::sync::Arc;

use dray_core::{Errno, FileId, NodeId, SessionId, fnv1a};

use super::kind::AuditKind;
use super::record::{
    AuditClient, AuditGap, AuditPeer, AuditRecord, AuditSet, AuditTotals, AuditUser, GROUPS_MAX,
    Text, is_joined, joined,
};
use super::segment::Corruption;
use super::varint::{RecordInput, put, put_signed, put_text};

/// Slots of the table of files.
const FILES: usize = 2048;
/// Slots of the tables of callers and clients.
const USERS: usize = 256;
/// Longest path that is taken over, bytes (`PATH_MAX` with room).
pub(super) const PATH_MAX_BYTES: usize = 8192;

/// Which fields a record has.
mod has {
    pub(super) const ID: u64 = 1;
    pub(super) const PARENT: u64 = 1 << 1;
    pub(super) const NAME: u64 = 1 << 2;
    pub(super) const ERROR: u64 = 1 << 3;
    pub(super) const OPEN: u64 = 1 << 4;
    pub(super) const TOTALS: u64 = 1 << 5;
    /// The path of the file is that of directory and name.
    pub(super) const DERIVED: u64 = 1 << 6;
    pub(super) const TO: u64 = 1 << 7;
    pub(super) const XATTR: u64 = 1 << 8;
    pub(super) const SET: u64 = 1 << 9;
    pub(super) const BYTES: u64 = 1 << 10;
    pub(super) const REPEATED: u64 = 1 << 11;
    pub(super) const GAP: u64 = 1 << 12;
    pub(super) const ALL: u64 = (1 << 13) - 1;
}

type KnownFile = (FileId, Option<Text>);

/// The state of both ends.
pub(super) struct Codec {
    time_us: u64,
    ino: u64,
    path: Text,
    files: Vec<Option<KnownFile>>,
    users: Vec<Option<Arc<AuditUser>>>,
    clients: Vec<Option<AuditClient>>,
}

fn slot_of(id: FileId) -> usize {
    let mixed = (id.ino ^ id.generation.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as usize % FILES
}

fn slot_of_user(user: &AuditUser) -> usize {
    let ids = u64::from(user.uid) << 32 | u64::from(user.gid);
    let mixed = (ids ^ fnv1a(user.job.as_bytes())).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as usize % USERS
}

fn slot_of_client(client: &AuditClient) -> usize {
    let mixed = (client.node.0 ^ client.session.0).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as usize % USERS
}

/// The path that directory and name give.
fn derived(parent: Option<&Text>, name: Option<&Text>) -> Option<Text> {
    Some(joined(parent?, name?))
}

impl Codec {
    pub(super) fn new() -> Codec {
        Codec {
            time_us: 0,
            ino: 0,
            path: Arc::from(&b""[..]),
            files: vec![None; FILES],
            users: vec![None; USERS],
            clients: vec![None; USERS],
        }
    }

    /// Appends a record. `parent_path`: of its directory; `to_parent_path`: of the directory that a
    /// rename leads to.
    pub(super) fn put(
        &mut self,
        record: &AuditRecord,
        (parent_path, to_parent_path): (Option<&Text>, Option<&Text>),
        out: &mut Vec<u8>,
    ) {
        let by_name = match record.to_parent {
            Some(_) if record.kind != AuditKind::Rename => {
                (to_parent_path, record.to_name.as_ref())
            }
            _ => (parent_path, record.name.as_ref()),
        };
        let path = record.path.as_ref();
        let is_derived = match (path, by_name) {
            (Some(path), (Some(parent), Some(name))) => is_joined(path, parent, name),
            (None, _) | (_, (None, _) | (_, None)) => false,
        };
        let mut fields = 0;
        for (bit, there) in [
            (has::ID, record.id.is_some()),
            (has::PARENT, record.parent.is_some()),
            (has::NAME, record.name.is_some()),
            (has::ERROR, record.error.is_some()),
            (has::OPEN, record.open_flags.is_some()),
            (has::TOTALS, record.totals.is_some()),
            (has::DERIVED, is_derived),
            (has::TO, record.to_parent.is_some() && record.to_name.is_some()),
            (has::XATTR, record.xattr.is_some()),
            (has::SET, record.set.is_some()),
            (has::BYTES, record.bytes > 0),
            (has::REPEATED, record.repeated),
            (has::GAP, record.gap.is_some()),
        ] {
            fields |= if there { bit } else { 0 };
        }
        out.push(record.kind as u8);
        put(out, fields);
        put_signed(out, record.time_us.wrapping_sub(self.time_us) as i64);
        self.time_us = record.time_us;
        self.put_user(&record.user, out);
        self.put_client(&record.client, out);
        if let Some(parent) = record.parent {
            self.put_file(parent, parent_path, out);
        }
        if let Some(name) = &record.name {
            put_text(out, name);
        }
        if let (Some(parent), Some(name)) = (record.to_parent, &record.to_name) {
            self.put_file(parent, to_parent_path, out);
            put_text(out, name);
        }
        match record.id {
            Some(id) if is_derived => self.put_derived(id, path, out),
            Some(id) => self.put_file(id, path, out),
            None => {}
        }
        self.put_rest(record, out);
    }

    fn put_rest(&mut self, record: &AuditRecord, out: &mut Vec<u8>) {
        if let Some(error) = record.error {
            put(out, error.raw() as u64);
        }
        if let Some(flags) = record.open_flags {
            put(out, flags.into());
        }
        if let Some(totals) = &record.totals {
            let AuditTotals { read_bytes, reads, written_bytes, writes } = *totals;
            [read_bytes, reads, written_bytes, writes].into_iter().for_each(|one| put(out, one));
        }
        if let Some(xattr) = &record.xattr {
            put_text(out, xattr);
        }
        if let Some(set) = &record.set {
            let all = [set.mode, set.uid, set.gid].map(|one| one.map(u64::from));
            for one in all.into_iter().chain([set.size]) {
                put(out, one.is_some().into());
                if let Some(one) = one {
                    put(out, one);
                }
            }
        }
        if record.bytes > 0 {
            put(out, record.bytes);
        }
        if let Some(gap) = &record.gap {
            put(out, gap.records);
            put_text(out, gap.why.as_bytes());
        }
    }

    fn put_user(&mut self, user: &Arc<AuditUser>, out: &mut Vec<u8>) {
        let slot = slot_of_user(user);
        let known = &mut self.users[slot];
        if known.as_ref().is_some_and(|known| Arc::ptr_eq(known, user) || known == user) {
            return put(out, (slot as u64) << 1);
        }
        put(out, (slot as u64) << 1 | 1);
        put(out, user.uid.into());
        put(out, user.gid.into());
        put(out, user.groups.len() as u64);
        user.groups.iter().for_each(|group| put(out, (*group).into()));
        put(out, user.groups_left_out.into());
        put_text(out, user.job.as_bytes());
        *known = Some(user.clone());
    }

    fn put_client(&mut self, client: &AuditClient, out: &mut Vec<u8>) {
        let slot = slot_of_client(client);
        let known = &mut self.clients[slot];
        if known.as_ref() == Some(client) {
            return put(out, (slot as u64) << 1);
        }
        put(out, (slot as u64) << 1 | 1);
        put(out, client.node.0);
        put(out, client.session.0);
        match client.peer {
            AuditPeer::None => out.push(0),
            AuditPeer::Local => out.push(1),
            AuditPeer::Ip(std::net::IpAddr::V4(address)) => {
                out.push(4);
                out.extend_from_slice(&address.octets());
            }
            AuditPeer::Ip(std::net::IpAddr::V6(address)) => {
                out.push(6);
                out.extend_from_slice(&address.octets());
            }
        }
        *known = Some(*client);
    }

    /// A file whose path directory and name give.
    fn put_derived(&mut self, id: FileId, path: Option<&Text>, out: &mut Vec<u8>) {
        put_signed(out, id.ino.wrapping_sub(self.ino) as i64);
        put(out, id.generation);
        self.ino = id.ino;
        self.files[slot_of(id)] = Some((id, path.cloned()));
    }

    fn put_file(&mut self, id: FileId, path: Option<&Text>, out: &mut Vec<u8>) {
        let slot = slot_of(id);
        let is_known = self.files[slot]
            .as_ref()
            .is_some_and(|known| known.0 == id && known.1.as_ref() == path);
        if is_known {
            return put(out, (slot as u64) << 1);
        }
        put(out, (slot as u64) << 1 | 1);
        put_signed(out, id.ino.wrapping_sub(self.ino) as i64);
        put(out, id.generation);
        self.ino = id.ino;
        match path {
            None => put(out, 0),
            Some(path) => {
                let pairs = path.iter().zip(self.path.iter());
                let shared = pairs.take_while(|(one, other)| one == other).count();
                put(out, shared as u64 + 1);
                put_text(out, &path[shared..]);
                self.path = path.clone();
            }
        }
        self.files[slot] = Some((id, path.cloned()));
    }

    /// Decodes the record with this number from the front of `input`. Errors: no encoder has
    /// written that.
    pub(super) fn get(
        &mut self,
        index: u64,
        input: &mut RecordInput<'_>,
    ) -> Result<AuditRecord, Corruption> {
        let kind = AuditKind::of_number(input.byte()?).ok_or(Corruption("a kind is not known"))?;
        let fields = input.number()?;
        if fields & !has::ALL != 0 {
            return Err(Corruption("a field is not known"));
        }
        let of = |bit| fields & bit != 0;
        self.time_us = self.time_us.wrapping_add(input.signed()? as u64);
        let mut record = AuditRecord { index, ..AuditRecord::new(kind, self.time_us) };
        record.user = self.user(input)?;
        record.client = self.client(input)?;
        let mut by_name = (None, None);
        if of(has::PARENT) {
            let (parent, path) = self.file(input)?;
            (record.parent, by_name.0) = (Some(parent), path);
        }
        if of(has::NAME) {
            record.name = Some(Arc::from(input.text()?));
            by_name.1 = record.name.clone();
        }
        if of(has::TO) {
            let (parent, path) = self.file(input)?;
            record.to_parent = Some(parent);
            record.to_name = Some(Arc::from(input.text()?));
            record.to_path = derived(path.as_ref(), record.to_name.as_ref());
            if kind != AuditKind::Rename {
                by_name = (path, record.to_name.clone());
            }
        }
        if of(has::ID) && of(has::DERIVED) {
            let path = derived(by_name.0.as_ref(), by_name.1.as_ref());
            record.id = Some(self.derived_file(path.as_ref(), input)?);
            record.path = path;
        } else if of(has::ID) {
            let (id, path) = self.file(input)?;
            (record.id, record.path) = (Some(id), path);
        } else if of(has::DERIVED) {
            record.path = derived(by_name.0.as_ref(), by_name.1.as_ref());
        }
        self.rest(&mut record, fields, input)?;
        Ok(record)
    }

    fn rest(
        &mut self,
        record: &mut AuditRecord,
        fields: u64,
        input: &mut RecordInput<'_>,
    ) -> Result<(), Corruption> {
        let of = |bit| fields & bit != 0;
        if of(has::ERROR) {
            let raw = input.number()?;
            let raw = i32::try_from(raw).ok().filter(|raw| (1..4096).contains(raw));
            record.error = Some(Errno::new(raw.ok_or(Corruption("an error number is none"))?));
        }
        if of(has::OPEN) {
            record.open_flags = Some(input.small()?);
        }
        if of(has::TOTALS) {
            record.totals = Some(AuditTotals {
                read_bytes: input.number()?,
                reads: input.number()?,
                written_bytes: input.number()?,
                writes: input.number()?,
            });
        }
        if of(has::XATTR) {
            record.xattr = Some(Arc::from(input.text()?));
        }
        if of(has::SET) {
            let mut one = || match input.number()? {
                0 => Ok(None),
                1 => input.number().map(Some),
                _ => Err(Corruption("a field is neither there nor not")),
            };
            let all = [one()?, one()?, one()?, one()?];
            let small = |number: Option<u64>| match number.map(u32::try_from) {
                Some(Err(_)) => Err(Corruption("a number is too large")),
                Some(Ok(number)) => Ok(Some(number)),
                None => Ok(None),
            };
            let (mode, uid, gid) = (small(all[0])?, small(all[1])?, small(all[2])?);
            record.set = Some(AuditSet { mode, uid, gid, size: all[3] });
        }
        if of(has::BYTES) {
            record.bytes = input.number()?;
        }
        record.repeated = of(has::REPEATED);
        if of(has::GAP) {
            let records = input.number()?;
            let why = String::from_utf8_lossy(input.text()?).into_owned();
            record.gap = Some(AuditGap { records, why });
        }
        Ok(())
    }

    fn user(&mut self, input: &mut RecordInput<'_>) -> Result<Arc<AuditUser>, Corruption> {
        let slot = input.number()?;
        let known = self.users.get_mut((slot >> 1) as usize).ok_or(Corruption("no such caller"))?;
        if slot & 1 == 0 {
            return known.clone().ok_or(Corruption("a caller is not known"));
        }
        let (uid, gid, count) = (input.small()?, input.small()?, input.number()?);
        if count > GROUPS_MAX as u64 {
            return Err(Corruption("too many groups"));
        }
        let groups = (0..count).map(|_| input.small()).collect::<Result<_, _>>()?;
        let groups_left_out = input.small()?;
        let job = String::from_utf8_lossy(input.text()?).into_owned();
        let user = Arc::new(AuditUser { uid, gid, groups, groups_left_out, job });
        *known = Some(user.clone());
        Ok(user)
    }

    fn client(&mut self, input: &mut RecordInput<'_>) -> Result<AuditClient, Corruption> {
        let slot = input.number()?;
        let known =
            self.clients.get_mut((slot >> 1) as usize).ok_or(Corruption("no such client"))?;
        if slot & 1 == 0 {
            return known.ok_or(Corruption("a client is not known"));
        }
        let (node, session) = (NodeId(input.number()?), SessionId(input.number()?));
        let wrong = |_| Corruption("an address is none");
        let peer = match input.byte()? {
            0 => AuditPeer::None,
            1 => AuditPeer::Local,
            4 => AuditPeer::Ip(<[u8; 4]>::try_from(input.bytes(4)?).map_err(wrong)?.into()),
            6 => AuditPeer::Ip(<[u8; 16]>::try_from(input.bytes(16)?).map_err(wrong)?.into()),
            _ => return Err(Corruption("an address is none")),
        };
        let client = AuditClient { node, session, peer };
        *known = Some(client);
        Ok(client)
    }

    fn derived_file(
        &mut self,
        path: Option<&Text>,
        input: &mut RecordInput<'_>,
    ) -> Result<FileId, Corruption> {
        let id = self.new_id(input)?;
        self.files[slot_of(id)] = Some((id, path.cloned()));
        Ok(id)
    }

    fn new_id(&mut self, input: &mut RecordInput<'_>) -> Result<FileId, Corruption> {
        let ino = self.ino.wrapping_add(input.signed()? as u64);
        self.ino = ino;
        Ok(FileId { ino, generation: input.number()? })
    }

    fn file(&mut self, input: &mut RecordInput<'_>) -> Result<KnownFile, Corruption> {
        let slot = input.number()?;
        let at = (slot >> 1) as usize;
        let known = self.files.get(at).ok_or(Corruption("no such file"))?;
        if slot & 1 == 0 {
            return known.clone().ok_or(Corruption("a file is not known"));
        }
        let id = self.new_id(input)?;
        let path = match input.number()? {
            0 => None,
            shared => {
                let shared = usize::try_from(shared - 1).map_err(|_| Corruption("too long"))?;
                let begin = self.path.get(..shared).ok_or(Corruption("a path shares too much"))?;
                let rest = input.text()?;
                if begin.len() + rest.len() > 2 * PATH_MAX_BYTES {
                    return Err(Corruption("a path is too long"));
                }
                let path: Text = [begin, rest].concat().into();
                self.path = path.clone();
                Some(path)
            }
        };
        self.files[at] = Some((id, path.clone()));
        Ok((id, path))
    }
}
