//! A record as a call leaves it in the ring: plain, and quick to write.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use dray_core::{CallDetail, Context, Errno, FileId, NodeId, ObservedCall, SessionId};
use std::sync::atomic::Ordering;

use super::kind::AuditKind;
use super::record::{
    AuditClient, AuditPeer, AuditRecord, AuditSet, AuditTotals, AuditUser, GROUPS_MAX, Text,
};
use super::segment::Corruption;
use super::varint::RecordInput;
use crate::observe::Outcome;

/// Longest job that is taken over, bytes.
const JOB_MAX_BYTES: usize = 255;
/// Longest name that is taken over, bytes. No file system takes longer ones (`NAME_MAX`).
const NAME_MAX_BYTES: usize = 255;
/// Most bytes of a record in the ring.
pub(super) const RAW_MAX_BYTES: usize = 2048;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(Vec::with_capacity(RAW_MAX_BYTES));
}

/// A call that becomes a record.
pub(super) struct RawCall<'a> {
    pub(super) cx: &'a Context,
    pub(super) call: &'a ObservedCall<'a>,
    pub(super) outcome: Outcome<'a>,
    pub(super) kind: AuditKind,
    pub(super) time_us: u64,
    pub(super) repeated: bool,
}

/// Encodes a call and hands it on.
pub(super) fn encoded<T>(raw: &RawCall<'_>, with: impl FnOnce(&[u8]) -> T) -> T {
    BUFFER.with_borrow_mut(|buffer| {
        buffer.clear();
        put(raw, buffer);
        with(buffer)
    })
}

fn put(raw: &RawCall<'_>, out: &mut Vec<u8>) {
    let RawCall { cx, call, outcome, kind, time_us, repeated } = raw;
    out.push(*kind as u8);
    out.push(u8::from(*repeated));
    let errno = outcome.error.map_or(0, |error| error.errno().raw() as u16);
    out.extend_from_slice(&errno.to_le_bytes());
    out.extend_from_slice(&time_us.to_le_bytes());
    put_user(cx, out);
    put_client(cx, out);
    let (id, parent) = ids(*kind, call, outcome);
    put_id(id, out);
    put_id(parent, out);
    put_text(call.name.map(|name| name.as_bytes()), out);
    put_id(call.to.map(|(dir, _)| dir), out);
    put_text(call.to.map(|(_, name)| name.as_bytes()), out);
    let flags = call.open.map_or(u32::MAX, |how| how.flags as u32);
    out.extend_from_slice(&flags.to_le_bytes());
    put_detail(call, outcome, out);
}

/// The file and the directory of a call. A creation is in a directory, also that of a file without a name.
fn ids(
    kind: AuditKind,
    call: &ObservedCall<'_>,
    outcome: &Outcome<'_>,
) -> (Option<FileId>, Option<FileId>) {
    let in_directory = call.name.is_some() || kind == AuditKind::Create;
    match in_directory {
        true => (outcome.id, Some(call.id)),
        false => (Some(call.id), None),
    }
}

fn put_user(cx: &Context, out: &mut Vec<u8>) {
    let who = &*cx.who;
    out.extend_from_slice(&who.uid.0.to_le_bytes());
    out.extend_from_slice(&who.gid.0.to_le_bytes());
    let count = who.groups.len().min(GROUPS_MAX);
    out.push(count as u8);
    out.extend_from_slice(&((who.groups.len() - count) as u32).to_le_bytes());
    who.groups[..count].iter().for_each(|group| out.extend_from_slice(&group.0.to_le_bytes()));
    let job = who.job.as_bytes();
    let job = &job[..job.len().min(JOB_MAX_BYTES)];
    out.push(job.len() as u8);
    out.extend_from_slice(job);
}

fn put_client(cx: &Context, out: &mut Vec<u8>) {
    out.extend_from_slice(&cx.origin.node.0.to_le_bytes());
    let session = cx.via.map_or(0, |via| via.session.0);
    out.extend_from_slice(&session.to_le_bytes());
    match cx.via.map_or(AuditPeer::None, |via| via.peer.into()) {
        AuditPeer::None => out.push(0),
        AuditPeer::Local => out.push(1),
        AuditPeer::Ip(IpAddr::V4(address)) => {
            out.push(4);
            out.extend_from_slice(&address.octets());
        }
        AuditPeer::Ip(IpAddr::V6(address)) => {
            out.push(6);
            out.extend_from_slice(&address.octets());
        }
    }
}

fn put_id(id: Option<FileId>, out: &mut Vec<u8>) {
    out.push(id.is_some().into());
    if let Some(FileId { ino, generation }) = id {
        out.extend_from_slice(&ino.to_le_bytes());
        out.extend_from_slice(&generation.to_le_bytes());
    }
}

fn put_text(text: Option<&[u8]>, out: &mut Vec<u8>) {
    let text = text.unwrap_or_default();
    let text = &text[..text.len().min(NAME_MAX_BYTES)];
    out.push(text.len() as u8);
    out.extend_from_slice(text);
}

fn put_detail(call: &ObservedCall<'_>, outcome: &Outcome<'_>, out: &mut Vec<u8>) {
    let numbers = |out: &mut Vec<u8>, all: [u64; 4]| {
        all.into_iter().for_each(|one| out.extend_from_slice(&one.to_le_bytes()));
    };
    match call.detail {
        CallDetail::Closed(totals) => {
            out.push(1);
            let load = |one: &std::sync::atomic::AtomicU64| one.load(Ordering::Relaxed);
            let (read, written) = (load(&totals.read_bytes), load(&totals.written_bytes));
            numbers(out, [read, load(&totals.reads), written, load(&totals.writes)]);
        }
        CallDetail::Set(set) => {
            out.push(2);
            let there = [set.mode.is_some(), set.uid.is_some(), set.gid.is_some()];
            let there = there.into_iter().chain([set.size.is_some()]).enumerate();
            out.push(there.map(|(bit, there)| u8::from(there) << bit).sum());
            let or_0 = |one: Option<u32>| u64::from(one.unwrap_or(0));
            let (uid, gid) = (set.uid.map(|uid| uid.0), set.gid.map(|gid| gid.0));
            numbers(out, [or_0(set.mode), or_0(uid), or_0(gid), set.size.unwrap_or(0)]);
        }
        CallDetail::Xattr(name) => {
            out.push(3);
            put_text(Some(name), out);
        }
        CallDetail::Nothing | CallDetail::Make(_) | CallDetail::Remove(_) => match outcome.bytes {
            0 => out.push(0),
            bytes => {
                out.push(4);
                out.extend_from_slice(&bytes.to_le_bytes());
            }
        },
    }
}

/// The user of the record before. Most records have the same.
#[derive(Default)]
pub(super) struct LastUser {
    encoded: Vec<u8>,
    user: Arc<AuditUser>,
}

impl LastUser {
    fn decode(&mut self, input: &mut RecordInput<'_>) -> Result<Arc<AuditUser>, Corruption> {
        // Users are encoded so that none is the beginning of another one.
        match input.0.strip_prefix(&self.encoded[..]) {
            Some(rest) if !self.encoded.is_empty() => input.0 = rest,
            _ => {
                let before = input.0;
                self.user = Arc::new(user(input)?);
                self.encoded.clear();
                self.encoded.extend_from_slice(&before[..before.len() - input.0.len()]);
            }
        }
        Ok(self.user.clone())
    }
}

/// Decodes what [`encoded`] has made. Errors: it did not.
pub(super) fn decode(bytes: &[u8], last: &mut LastUser) -> Result<AuditRecord, Corruption> {
    let mut input = RecordInput(bytes);
    let kind = AuditKind::of_number(input.byte()?).ok_or(Corruption("a kind is not known"))?;
    let repeated = input.byte()? != 0;
    let errno = u16_of(&mut input)?;
    let mut record = AuditRecord::new(kind, u64_of(&mut input)?);
    record.repeated = repeated;
    record.error = (errno != 0).then(|| Errno::new(errno.into()));
    record.user = last.decode(&mut input)?;
    record.client = client(&mut input)?;
    record.id = id(&mut input)?;
    record.parent = id(&mut input)?;
    record.name = text(&mut input)?;
    record.to_parent = id(&mut input)?;
    record.to_name = text(&mut input)?;
    let flags = u32_of(&mut input)?;
    record.open_flags = (flags != u32::MAX).then_some(flags);
    match input.byte()? {
        0 => {}
        1 => {
            let [read_bytes, reads, written_bytes, writes] = four(&mut input)?;
            record.totals = Some(AuditTotals { read_bytes, reads, written_bytes, writes });
        }
        2 => {
            let there = input.byte()?;
            let all = four(&mut input)?;
            let small = |bit: usize| (there >> bit & 1 == 1).then_some(all[bit] as u32);
            let size = (there >> 3 & 1 == 1).then_some(all[3]);
            record.set = Some(AuditSet { mode: small(0), uid: small(1), gid: small(2), size });
        }
        3 => record.xattr = text(&mut input)?,
        4 => record.bytes = u64_of(&mut input)?,
        _ => return Err(Corruption("a detail is not known")),
    }
    match input.0 {
        [] => Ok(record),
        _ => Err(Corruption("there are bytes behind the record")),
    }
}

fn fixed<const N: usize>(input: &mut RecordInput<'_>) -> Result<[u8; N], Corruption> {
    <[u8; N]>::try_from(input.bytes(N)?).map_err(|_| Corruption("it ends within a number"))
}

fn u16_of(input: &mut RecordInput<'_>) -> Result<u16, Corruption> {
    fixed(input).map(u16::from_le_bytes)
}

fn u32_of(input: &mut RecordInput<'_>) -> Result<u32, Corruption> {
    fixed(input).map(u32::from_le_bytes)
}

fn u64_of(input: &mut RecordInput<'_>) -> Result<u64, Corruption> {
    fixed(input).map(u64::from_le_bytes)
}

fn four(input: &mut RecordInput<'_>) -> Result<[u64; 4], Corruption> {
    Ok([u64_of(input)?, u64_of(input)?, u64_of(input)?, u64_of(input)?])
}

fn id(input: &mut RecordInput<'_>) -> Result<Option<FileId>, Corruption> {
    match input.byte()? {
        0 => Ok(None),
        _ => Ok(Some(FileId { ino: u64_of(input)?, generation: u64_of(input)? })),
    }
}

fn text(input: &mut RecordInput<'_>) -> Result<Option<Text>, Corruption> {
    match input.byte()? {
        0 => Ok(None),
        len_bytes => Ok(Some(Arc::from(input.bytes(len_bytes.into())?))),
    }
}

fn user(input: &mut RecordInput<'_>) -> Result<AuditUser, Corruption> {
    let (uid, gid) = (u32_of(input)?, u32_of(input)?);
    let count = usize::from(input.byte()?).min(GROUPS_MAX);
    let groups_left_out = u32_of(input)?;
    let groups = (0..count).map(|_| u32_of(input)).collect::<Result<_, _>>()?;
    let len_bytes = input.byte()?;
    let job = String::from_utf8_lossy(input.bytes(len_bytes.into())?).into_owned();
    Ok(AuditUser { uid, gid, groups, groups_left_out, job })
}

fn client(input: &mut RecordInput<'_>) -> Result<AuditClient, Corruption> {
    let (node, session) = (NodeId(u64_of(input)?), SessionId(u64_of(input)?));
    let peer = match input.byte()? {
        0 => AuditPeer::None,
        1 => AuditPeer::Local,
        4 => AuditPeer::Ip(Ipv4Addr::from(fixed::<4>(input)?).into()),
        6 => AuditPeer::Ip(Ipv6Addr::from(fixed::<16>(input)?).into()),
        _ => return Err(Corruption("an address is none")),
    };
    Ok(AuditClient { node, session, peer })
}
