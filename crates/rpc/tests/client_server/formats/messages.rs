//! The protocol: handshakes, calls, what answers are made of, notices, proofs.

use std::collections::BTreeSet;
use std::time::Duration;

use dray_core::{
    Access, Allocate, AtOpen, Attr, CreateHow, DirPage, Entry, Errno, Error, FileId, FileType,
    FsInfo, FsUuid, Gid, Identity, LeaseKinds, Lock, LockFamily, LockKind, LockOwner, LockRange,
    NameBuf, NodeId, Op, OpenHow, PageValidity, Pid, RecallItem, RemoveKind, RenameHow, RequestId,
    Seek, SetAttr, Statfs, TimeSet, Timestamp, Ttl, Uid, Validity, Write, XattrSet, Xflags,
};
use dray_rpc::auth::{Key, Role, Transcript};
use dray_rpc::wire::{
    AuditCall, AuditConsumer, AuditHello, AuditPart, AuditReply, AuditSummary, AuditWanted,
    AuditWelcome, Auth, BatchHead, BatchOutcome, BatchReply, Call, CallHead, Challenge, Change,
    FileDurableStamp, Hello, Input, LockPurpose, NotifyHead, Proof, RecallMessage, Refused,
    ReplicaHello, ReplicaWelcome, ReplyHead, Stamp, Ticket, VERSION_MAX, VERSION_MIN, Welcome,
    Wire, WriteBase, get_callers, get_changed, get_durable_stamps, get_jobs, put_callers,
    put_changed, put_durable_stamp, put_jobs,
};

use super::written::Written;
use crate::common::raw::{frame, identity_of};

const FILE: FileId = FileId { ino: 0x0102_0304_0506_0708, generation: 0x1112_1314_1516_1718 };
const OTHER: FileId = FileId { ino: 5, generation: 6 };
const HANDLE: u64 = 0x2122_2324_2526_2728;
const NAME: &[u8] = b"name";
/// Features that were known when the first lines were written; further ones are further bits.
const KNOWN: u64 = 0x7f;

fn protocol() -> Written {
    assert_eq!((VERSION_MIN, VERSION_MAX), (1, 1), "a version has a file of its own");
    Written::in_file("protocol-1.txt")
}

fn ticket() -> Ticket {
    Ticket([3, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15])
}

fn hello() -> Hello {
    Hello {
        version_min: 1,
        version_max: 1,
        features: KNOWN,
        auth: Auth::Psk,
        nonce: [7; 32],
        export: "data".into(),
        node: NodeId(99),
        host: "node1".into(),
        software: "0.1.0".into(),
    }
}

fn info() -> FsInfo {
    FsInfo { uuid: FsUuid(5 << 64 | 6), root: FILE, kind: "ext4".into(), read_only: true }
}

fn attr() -> Attr {
    let at = |sec| Timestamp { sec, nsec: 7 };
    Attr {
        ino: 8,
        mode: 0o100_644,
        nlink: 2,
        uid: Uid(1000),
        gid: Gid(1001),
        rdev: 3,
        block_bytes: 4096,
        size: 1 << 40,
        blocks: 16,
        atime: at(1),
        mtime: at(-2),
        ctime: at(3),
        btime: at(4),
        attributes: 0x10,
        attributes_mask: 0x30,
        validity: Validity::UNSAID,
    }
}

fn set_attr() -> SetAttr {
    SetAttr {
        mode: Some(0o640),
        uid: Some(Uid(1000)),
        gid: None,
        size: Some(77),
        atime: Some(TimeSet::Now),
        mtime: Some(TimeSet::At(Timestamp { sec: -5, nsec: 9 })),
        kill_set_id: true,
    }
}

fn lock() -> Lock {
    Lock {
        family: LockFamily::Flock,
        kind: LockKind::Exclusive,
        range: LockRange { start: 1, end: u64::MAX },
        owner: LockOwner::own(17),
        pid: Pid(18),
    }
}

/// A call of each kind.
fn calls() -> Vec<Call<'static>> {
    let open = OpenHow { flags: 0o102_001, kill_set_id: true, with_attr: true };
    let create = CreateHow { open, mode: 0o640, exclusive: true };
    let (id, dir, name, handle, target) = (FILE, OTHER, NAME, HANDLE, &b"target"[..]);
    let write = Write { at: 1 << 33, append: true, sync: false, kill_set_id: true };
    let at = Timestamp { sec: 5, nsec: 6 };
    let base = WriteBase { size: 4, mtime: at, ctime: Timestamp { sec: 7, nsec: 8 } };
    let what = Allocate { flags: 3, at: 4096, len_bytes: 8192 };
    vec![
        Call::Lookup { dir, name },
        Call::Parent { dir },
        Call::Getattr { id, handle: Some(handle) },
        Call::Setattr { id, handle: None, set: set_attr() },
        Call::Readlink { id },
        Call::Make { dir, name, kind: 2, mode: 0o755, rdev: 9, target },
        Call::Remove { dir, name, kind: RemoveKind::Directory },
        Call::Rename { from: dir, from_name: name, to: id, to_name: b"", how: RenameHow::Exchange },
        Call::Link { id, dir, name },
        Call::Open { id, how: open, handle, again: true },
        Call::Create { dir, name, how: create, handle },
        Call::Tmpfile { dir, how: create, handle },
        Call::Access { id, want: Access(4) },
        Call::Statfs {},
        Call::Getxattr { id, name },
        Call::Setxattr { id, name, value: target, how: XattrSet::Replace },
        Call::Listxattr { id },
        Call::Removexattr { id, name },
        Call::Read { handle, at: 1 << 40, len_bytes: 4096 },
        Call::Write { handle, how: write },
        Call::Readdir { handle, cookie: 5, max_bytes: 65_536, plus: true },
        Call::Flush { handle, owner: LockOwner::own(17) },
        Call::Sync { handle, data_only: true },
        Call::Allocate { handle, what },
        Call::Seek { handle, at: 5, what: Seek::Hole },
        Call::CopyRange { handle, at: 1, to: 2, to_at: 3, len_bytes: 4 },
        Call::Lock { handle, lock: lock(), wait: true, purpose: LockPurpose::Program },
        Call::TestLock { handle, lock: lock() },
        Call::GetFlags { handle },
        Call::SetFlags { handle, flags: 0x10 },
        Call::Close { handle },
        Call::Put { dir, name, mode: 0o644 },
        Call::SyncAll {},
        Call::Recover {
            instance: 1,
            newest: 2,
            durable_stamp: 3,
            durable_stamps: &[1, 2, 3],
            step: 2,
        },
        Call::Redo { handle, stamp: 5, change: Change::Attr(set_attr()) },
        Call::Reopen { id, how: open, handle, ticket: ticket() },
        Call::Declare {
            instance: 1,
            durable_stamp: 3,
            ticket: ticket(),
            durable_stamps: &[],
            last: true,
        },
        Call::LookupOpen { dir, name, how: open, handle },
        Call::GetXflags { handle },
        Call::SetXflags { handle, set: xflags() },
        Call::OpenNamed { dir, name, id, how: open, handle },
        Call::Learn { dir, name, id },
        Call::Hold { number: 9, id: dir, name: Some(name) },
        Call::Release { number: 9 },
        Call::WriteBack { handle, lease: 3, base, kill_set_id: true, ends: false, extents: b"e" },
    ]
}

fn xflags() -> Xflags {
    Xflags { flags: 1, extent_bytes: 2, extents: 3, project: 4, cow_extent_bytes: 5 }
}

fn head(op: Op) -> CallHead {
    let flags = CallHead::ONE_WAY | CallHead::RECOVERY | CallHead::SPLIT_READ | CallHead::REST;
    CallHead {
        op,
        flags,
        tag: 0x3132_3334,
        slot: 5,
        sequence: 6,
        identity: 7,
        pid: Pid(8),
        umask: 0o22,
        request: RequestId(10),
    }
}

// proves: P137
#[test]
fn every_call_is_what_it_was() {
    let mut written = Written::in_file("calls-1.txt");
    let mut ops = BTreeSet::new();
    for call in calls() {
        let (mut message, op) = (Vec::new(), call.op());
        head(op).put_message(&mut message);
        call.put(&mut message);
        let then = written.same(&format!("{}:{}", op as u8, op.name()), &message);
        let mut input = Input(&then);
        assert_eq!(CallHead::get_message(&mut input), Ok(head(op)));
        assert_eq!(Call::get(op, &mut input), Ok(call));
        ops.insert(op);
    }
    assert!(Op::ALL.iter().all(|op| ops.contains(op)), "an operation is not among them");
    written.end();
}

// proves: P137
#[test]
fn every_other_message_is_what_it_was() {
    let mut written = protocol();
    handshakes(&mut written);
    replicas(&mut written);
    audits(&mut written);
    replies(&mut written);
    results(&mut written);
    notices(&mut written);
    proofs(&mut written);
    written.end();
}

fn handshakes(written: &mut Written) {
    let then = written.same("frame", &frame(b"head", b"data"));
    assert_eq!(then.len(), 64 + 4, "data begin at a cache line");
    let then = written.same("hello", &hello().message());
    assert_eq!(Hello::from_message(&then), Ok(hello()));
    assert_eq!(Hello::versions(&then), Ok((1, 1)));
    let challenge = Challenge { version: 1, features: KNOWN, nonce: [8; 32], proof: [9; 32] };
    let then = written.same("challenge", &challenge.message());
    assert_eq!(Challenge::from_message(&then), Ok(challenge));
    let proof =
        Proof { proof: [1; 32], session: 2, session_proof: [3; 32], replaces: 4, definition: 0 };
    let then = written.same("proof", &proof.message());
    assert_eq!(Proof::from_message(&then), Ok(proof.clone()));
    let proof = Proof { definition: 5, ..proof };
    let then = written.same("proof.definition", &proof.message());
    assert_eq!(Proof::from_message(&then), Ok(proof));
    let welcome = Welcome {
        session: 5,
        secret: [3; 16],
        resumed: true,
        connection: 7,
        instance: 8,
        boot: 9 << 64 | 10,
        calls_max: 128,
        slots: 64,
        lease_ms: 60_000,
        info: info(),
        lease_term_ms: 0,
        lease_epoch: 0,
    };
    let then = written.same("welcome", &welcome.message());
    assert_eq!(Welcome::from_message(&then), Ok(welcome.clone()));
    let welcome = Welcome { lease_term_ms: 5000, lease_epoch: 1, ..welcome };
    let then = written.same("welcome.leases", &welcome.message());
    assert_eq!(Welcome::from_message(&then), Ok(welcome));
    let refused = Refused { errno: 13, message: "why".into(), definition: String::new() };
    let then = written.same("refused", &refused.refusal());
    assert!(format!("{:?}", Welcome::from_message(&then)).contains(&format!("{refused:?}")));
    let refused = Refused { definition: "text".into(), ..refused };
    let then = written.same("refused.definition", &refused.refusal());
    assert!(format!("{:?}", Welcome::from_message(&then)).contains(&format!("{refused:?}")));
    let (uid, gid, groups) = (Uid(1000), Gid(1001), [Gid(4), Gid(27)].into());
    let who = Identity { uid, gid, groups, job: "job".into() };
    let then = written.same("identity", &identity_of(7, &who));
    assert_eq!(Input::whole::<(u32, Identity)>(&then[1..]), Ok((7, who)));
}

/// Between a server and who reads the audit of an export there.
fn audits(written: &mut Written) {
    let hello = AuditHello {
        version_min: 1,
        version_max: 1,
        features: 2,
        auth: Auth::Psk,
        nonce: [7; 32],
        export: "data".into(),
        software: "0.1.0".into(),
    };
    let then = written.same("audit.hello", &hello.message());
    assert_eq!(AuditHello::from_message(&then), Ok(hello));
    assert_eq!(AuditHello::versions(&then), Ok((1, 1)));
    let welcome = AuditWelcome { features: 3 };
    let then = written.same("audit.welcome", &welcome.message());
    assert_eq!(AuditWelcome::from_message(&then), Ok(welcome));
    for (number, call) in audit_calls().into_iter().enumerate() {
        let mut now = Vec::new();
        call.put_message(&mut now);
        let then = written.same(&format!("audit.call.{number}"), &now);
        assert_eq!(AuditCall::get_message(&then), Ok(call));
    }
    for (number, reply) in audit_replies().into_iter().enumerate() {
        let mut now = Vec::new();
        reply.put_message(&mut now);
        let then = written.same(&format!("audit.reply.{number}"), &now);
        assert_eq!(AuditReply::get_message(&then), Ok(reply));
    }
}

fn audit_consumer() -> AuditConsumer {
    AuditConsumer {
        name: "siem".into(),
        log: "0a".into(),
        bookmark: 4,
        kinds: "open+close".into(),
        uid: Some(1000),
        job: Some("job".into()),
        path: Some("/d".into()),
        moved_us: 5,
        idle_max_s: Some(6),
        trouble: "away".into(),
        trouble_us: 7,
    }
}

fn audit_calls() -> [AuditCall; 5] {
    let wanted = AuditWanted {
        kinds: "open".into(),
        uid: Some(1000),
        job: None,
        path: Some(b"/d".to_vec()),
        from_us: Some(7),
        to_us: None,
        denied: true,
    };
    [
        AuditCall::Read { from: 3, wanted, wait_ms: 500 },
        AuditCall::Summary,
        AuditCall::Register { consumer: audit_consumer(), oldest: true },
        AuditCall::Deregister { name: "siem".into() },
        AuditCall::Advance { name: "siem".into(), log: Some(1 << 64 | 2), to: Some(9) },
    ]
}

fn audit_replies() -> [AuditReply; 4] {
    let log = Some(1 << 64 | 2);
    [
        AuditReply::Failed { errno: 5, message: "why".into() },
        AuditReply::Part(AuditPart {
            next_index: 8,
            log,
            more: true,
            complete_us: 9,
            read_bytes: 10,
        }),
        AuditReply::Summary(AuditSummary {
            log,
            segments: 1,
            bytes: 2,
            first_index: 3,
            next_index: 4,
            consumers: vec![audit_consumer()],
        }),
        AuditReply::Done { bookmark: 11 },
    ]
}

/// Between two servers.
fn replicas(written: &mut Written) {
    let hello = ReplicaHello {
        version_min: 1,
        version_max: 1,
        features: 2,
        auth: Auth::Psk,
        nonce: [7; 32],
        slice: "data/0.1".into(),
        software: "0.1.0".into(),
    };
    let then = written.same("replica.hello", &hello.message());
    assert_eq!(ReplicaHello::from_message(&then), Ok(hello));
    assert_eq!(ReplicaHello::versions(&then), Ok((1, 1)));
    let welcome = ReplicaWelcome { batch_max_bytes: 3 };
    let then = written.same("replica.welcome", &welcome.message());
    assert_eq!(ReplicaWelcome::from_message(&then), Ok(welcome));
    let mut now = Vec::new();
    BatchHead { epoch: 4, number: 5 }.put_message(&mut now);
    let then = written.same("replica.batch", &now);
    assert_eq!(BatchHead::get_message(&then), Ok(BatchHead { epoch: 4, number: 5 }));
    for (number, outcome) in [
        BatchOutcome::Taken,
        BatchOutcome::Deposed,
        BatchOutcome::Incomplete,
        BatchOutcome::Malformed,
        BatchOutcome::Unkept,
    ]
    .into_iter()
    .enumerate()
    {
        let reply = BatchReply { epoch: 4, number: 5, outcome, errno: 28 };
        let mut now = Vec::new();
        reply.put_message(&mut now);
        let then = written.same(&format!("replica.reply.{number}"), &now);
        assert_eq!(BatchReply::get_message(&then), Ok(reply));
    }
}

fn replies(written: &mut Written) {
    let stamp = Stamp { number: 5, at: 4096 };
    let mut message = Vec::new();
    let head = ReplyHead {
        settled: true,
        stamp: Some(stamp),
        ticket: Some(ticket()),
        ..ReplyHead::success(0x4142_4344)
    };
    head.put_message(&mut message);
    77u32.put(&mut message);
    let then = written.same("reply.success", &message);
    let (came, results) = ReplyHead::split(&then).unwrap();
    assert_eq!((came, Input::whole::<u32>(results)), (head, Ok(77)));
    let changed_files = vec![(FILE, attr()), (OTHER, attr())];
    let head = ReplyHead { changed_files, ..ReplyHead::success(9) };
    let mut message = Vec::new();
    head.put_message(&mut message);
    77u32.put(&mut message);
    let then = written.same("reply.changed_files", &message);
    let (came, results) = ReplyHead::split(&then).unwrap();
    assert_eq!((came, Input::whole::<u32>(results)), (head, Ok(77)));
    let (error, retry) = (Error::unknown(Errno::EIO), Error::retry(Errno::EBADF));
    let unknown = ReplyHead { unknown_handle: true, ..ReplyHead::failure(9, &retry) };
    let absent = Error::new(Errno::ENOENT).absent_for(Some(Ttl::of(Duration::from_secs(1))));
    let mut message = Vec::new();
    ReplyHead::failure(9, &absent).put_message(&mut message);
    let then = written.same("reply.absent", &message);
    let mut leased = Vec::new();
    let write_lease = ReplyHead { write_lease: Some(7), ..ReplyHead::success(9) };
    write_lease.put_message(&mut leased);
    let lease = written.same("reply.write_lease", &leased);
    assert_eq!(ReplyHead::get_message(&mut Input(&lease)), Ok(write_lease));
    let head = ReplyHead::get_message(&mut Input(&then)).unwrap();
    let found = head.error().unwrap();
    assert_eq!((found.errno(), found.absence()), (Errno::ENOENT, absent.absence()));
    for (name, head) in
        [("reply.failure", ReplyHead::failure(9, &error)), ("reply.unknown_handle", unknown)]
    {
        let mut message = Vec::new();
        head.put_message(&mut message);
        let then = written.same(name, &message);
        assert_eq!(ReplyHead::get_message(&mut Input(&then)), Ok(head));
    }
}

fn results(written: &mut Written) {
    let entry = Entry { id: FILE, attr: attr() };
    written.value("attr", attr());
    let name = Some(Ttl::of(Duration::from_millis(1500)));
    let pages = Some(PageValidity::UntilRevoked);
    let validity = Validity { name, attributes: Some(Ttl::FOREVER), pages };
    written.value("attr.validity", Attr { validity, ..attr() });
    written.value("entry", entry);
    written.value("entry.flag", (entry, true));
    written.value("at_open", Some(AtOpen { attr: attr(), no_capability: true, times_past: None }));
    written.value("at_open.none", None::<AtOpen>);
    written.value("lock", Some(lock()));
    written.value("info", info());
    let statfs = Statfs {
        block_bytes: 1,
        fragment_bytes: 2,
        blocks: 3,
        blocks_free: 4,
        blocks_available: 5,
        files: 6,
        files_free: 7,
        name_max_bytes: 8,
    };
    written.value("statfs", statfs);
    let mut page = DirPage::default();
    page.push(b"first", FILE, Some(FileType::Regular), 5, Some(attr()));
    page.push(b"second", OTHER, None, 6, None);
    page.end = true;
    written.value("page", page);
    use FileType::*;
    let kinds = [Fifo, CharDevice, Directory, BlockDevice, Regular, Symlink, Socket];
    kinds.into_iter().enumerate().for_each(|(index, kind)| {
        written.value(&format!("type.{index}"), kind);
    });
    let changes = [
        Change::Write { at: 1 << 40 },
        Change::Size { size: 3 },
        Change::Allocate { flags: 3, at: 4096, len_bytes: 8192 },
    ];
    for (index, change) in changes.into_iter().enumerate() {
        written.value(&format!("change.{index}"), change);
    }
    let durable_stamp = FileDurableStamp { file: FILE, stamp: 100, ticket: ticket() };
    let mut durable_stamps = Vec::new();
    (0..2).for_each(|_| put_durable_stamp(&durable_stamp, &mut durable_stamps));
    let then = written.same("durable_stamps", &durable_stamps);
    assert_eq!(get_durable_stamps(&then), Ok(vec![durable_stamp.clone(), durable_stamp]));
}

fn notices(written: &mut Written) {
    for what in NotifyHead::CANCEL..=NotifyHead::CHANGED {
        let head = NotifyHead { what, flags: 0, tag: 5 };
        let mut message = Vec::new();
        head.put_message(&mut message);
        let then = written.same(&format!("notice.{what}"), &message);
        assert_eq!(NotifyHead::get_message(&mut Input(&then)), Ok(head));
    }
    let mut message = Vec::new();
    put_callers(&[Pid(7), Pid(8)], &mut message);
    let then = written.same("callers", &message);
    assert_eq!(get_callers(&mut Input(&then)), Ok(vec![Pid(7), Pid(8)]));
    message.clear();
    let jobs = vec![(Pid(7), "job".into())];
    put_jobs(&jobs, &mut message);
    let then = written.same("jobs", &message);
    assert_eq!(get_jobs(&mut Input(&then)), Ok(jobs));
    message.clear();
    put_changed(&[FILE, OTHER], &mut message);
    let then = written.same("changed", &message);
    assert_eq!(get_changed(2, &mut Input(&then)), Ok(vec![FILE, OTHER]));
    recalls(written);
}

fn recalls(written: &mut Written) {
    let all = LeaseKinds::ATTRIBUTES | LeaseKinds::NAMES;
    let items = vec![
        RecallItem { id: FILE, kinds: all, name: None },
        RecallItem { id: OTHER, kinds: LeaseKinds::NAMES, name: NameBuf::new(NAME).ok() },
    ];
    let recall = RecallMessage { number: 7, items };
    let mut message = Vec::new();
    recall.put_message(&mut message);
    let then = written.same("recall", &message);
    let mut input = Input(&then);
    let head = NotifyHead { what: NotifyHead::RECALL, flags: 0, tag: 2 };
    assert_eq!(NotifyHead::get_message(&mut input), Ok(head));
    assert_eq!(RecallMessage::get(2, &mut input), Ok(recall));
    message.clear();
    RecallMessage::put_answer(7, &mut message);
    let then = written.same("recalled", &message);
    let mut input = Input(&then);
    let head = NotifyHead { what: NotifyHead::RECALLED, flags: 0, tag: 0 };
    assert_eq!(NotifyHead::get_message(&mut input), Ok(head));
    assert_eq!(Input::whole::<u64>(input.0), Ok(7));
}

/// Both ends of a handshake reckon them, and two versions must come to the same.
fn proofs(written: &mut Written) {
    let key = Key::new(b"0123456789abcdef").unwrap();
    let proof =
        Proof { proof: [0; 32], session: 2, session_proof: [0; 32], replaces: 4, definition: 0 };
    let (hello, wish) = (hello().message(), proof.wish());
    let seen =
        Transcript { hello: &hello, version: 1, features: 5, server_nonce: &[8; 32], wish: &wish };
    for role in [Role::Client, Role::Server, Role::Session] {
        written.same(&format!("proof.{role:?}"), &key.prove(role, seen));
    }
    let wish = Proof { definition: 5, ..proof }.wish();
    let seen = Transcript { wish: &wish, ..seen };
    for role in [Role::Client, Role::Session] {
        written.same(&format!("proof.{role:?}.definition"), &key.prove(role, seen));
    }
}
