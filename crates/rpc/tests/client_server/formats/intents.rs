//! Intents: what is noted before a change, by which another server finds out whether it was made.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dray_backends::memory::MemoryFs;
use dray_core::{
    Allocate, Buf, BufMut, Context, CreateHow, FileId, FileSystem, Name, Op, OpenHow, RemoveKind,
    RenameHow, SetAttr, Write, XattrSet,
};
use dray_fabric::Address;
use dray_rpc::auth::{Key, Role, Transcript};
use dray_rpc::server::{
    Export, Journal, MemoryJournal, Server, ServerOptions, SessionRecord, SlotRecord, StateLoss,
};
use dray_rpc::wire::{Call, CallHead, Challenge, Input, Proof, ReplyHead, Welcome};

use super::written::Written;
use crate::common::raw::{
    NO_PROOF, ask, frame, handshake, head, hello, identity, message, read_frame, unauthenticated,
};
use crate::common::{memory, run, serve_sockets};

/// Files in the root, each with its name as content; open by their place among these.
const FILES: [&str; 14] = [
    "written",
    "appended",
    "source",
    "target",
    "within",
    "set",
    "spaced",
    "labelled",
    "unlabelled",
    "linked",
    "removed",
    "moved",
    "left",
    "right",
];
const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
const DATA: &[u8] = b"data";

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn number(of: &str) -> u64 {
    FILES.iter().position(|name| *name == of).unwrap() as u64
}

async fn files() -> MemoryFs {
    let (fs, cx) = (memory(), Context::system());
    let root = fs.info().root;
    for text in FILES {
        let (_, file) = fs.create(&cx, root, name(text), NEW).await.unwrap();
        file.write(&cx, Write::at(0), Buf::from(text.as_bytes())).await.unwrap();
    }
    let id = fs.lookup(&cx, root, name("unlabelled")).await.unwrap().id;
    fs.setxattr(&cx, id, b"user.a", b"x", XattrSet::Create).await.unwrap();
    fs
}

/// Changes that cannot be made twice, and some that can. `id`: of a file.
fn changes(root: FileId, id: impl Fn(&str) -> FileId) -> Vec<Call<'static>> {
    let (dir, exchange) = (root, RenameHow::Exchange);
    let append = Write { append: true, ..Write::default() };
    let copy = |from: &str, to: &str, to_at| {
        let (handle, to) = (number(from), number(to));
        Call::CopyRange { handle, at: 1, to, to_at, len_bytes: 4 }
    };
    let set = SetAttr { size: Some(2), ..SetAttr::default() };
    let what = Allocate { flags: 0, at: 0, len_bytes: 100 };
    vec![
        Call::Make { dir, name: b"made", kind: 0, mode: 0o755, rdev: 0, target: b"" },
        Call::Create { dir, name: b"created", how: NEW, handle: 100 },
        Call::Link { id: id("linked"), dir, name: b"link" },
        Call::Remove { dir, name: b"removed", kind: RemoveKind::File },
        Call::Rename {
            from: dir,
            from_name: b"moved",
            to: dir,
            to_name: b"there",
            how: RenameHow::Replace,
        },
        Call::Rename { from: dir, from_name: b"left", to: dir, to_name: b"right", how: exchange },
        Call::Write { handle: number("written"), how: Write::at(2) },
        Call::Write { handle: number("appended"), how: append },
        copy("source", "target", 2),
        copy("within", "within", 6),
        Call::Setattr { id: id("set"), handle: None, set },
        Call::Allocate { handle: number("spaced"), what },
        Call::Setxattr { id: id("labelled"), name: b"user.a", value: b"x", how: XattrSet::Create },
        Call::Removexattr { id: id("unlabelled"), name: b"user.a" },
        Call::Put { dir, name: b"put", mode: 0o644 },
    ]
}

/// The final state, however often the server died.
async fn check(fs: &MemoryFs) {
    let (cx, root) = (Context::system(), fs.info().root);
    for (file, content) in [
        ("written", "wrdatan"),
        ("appended", "appendeddata"),
        ("target", "taourc"),
        ("within", "withinithi"),
        ("set", "se"),
        ("put", "data"),
        ("left", "right"),
        ("there", "moved"),
    ] {
        let id = fs.lookup(&cx, root, name(file)).await.unwrap().id;
        let open = fs.open(&cx, id, OpenHow::READ).await.unwrap();
        let read = open.read(&cx, 0, BufMut::heap(64)).await.unwrap();
        let read = String::from_utf8_lossy(read.filled()).into_owned();
        assert_eq!(read, content, "{file}");
    }
}

/// Runs `client` on a thread while a server of `fs` with this journal serves it.
async fn served(
    fs: &MemoryFs,
    journal: &MemoryJournal,
    client: impl FnOnce(&Path) + Send + 'static,
) {
    let dir = tempfile::tempdir().unwrap();
    let socket: PathBuf = dir.path().join("socket");
    let export = Export::new("data", Arc::new(fs.clone()), Vec::new());
    let server = Server::new(ServerOptions::default(), vec![export], Arc::new(journal.clone()));
    server.restore(StateLoss::Nothing).await;
    serve_sockets(&Address::Unix(socket.clone()), server).await;
    let client = std::thread::spawn(move || client(&socket));
    while !client.is_finished() {
        dray_rt::sleep(std::time::Duration::from_millis(5)).await;
    }
    client.join().unwrap();
}

/// Opens all files.
fn open_all(stream: &mut UnixStream, ids: &[FileId], again: bool) {
    for (handle, id) in (0..).zip(ids) {
        let open = Call::Open { id: *id, how: OpenHow::READ_WRITE, handle, again };
        assert_eq!(ask(stream, &head(Op::Open, 1), &open).unwrap().errno, 0, "{handle}");
    }
}

/// Makes each change in a slot of its own, or asks for it once more.
fn make_all(stream: &mut UnixStream, changes: &[Call<'_>]) {
    for (slot, call) in (0..).zip(changes) {
        let head = CallHead { slot, sequence: 1, ..head(call.op(), 2) };
        let writes = matches!(call, Call::Write { .. } | Call::Put { .. });
        let data = if writes { DATA } else { b"" };
        stream.write_all(&frame(&message(&head, call), data)).unwrap();
        let reply = read_frame(stream).unwrap().0;
        let reply = ReplyHead::get_message(&mut Input(&reply)).unwrap();
        assert_eq!(reply.errno, 0, "{call:?}");
    }
}

/// A connection that goes on with a session, whose secret is known.
fn handshake_again(socket: &Path, record: &SessionRecord) -> UnixStream {
    let mut stream = unauthenticated(socket);
    let hello = hello("data").message();
    stream.write_all(&frame(&hello, b"")).unwrap();
    let challenge = Challenge::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    let mut proof = Proof { session: record.id, ..NO_PROOF };
    let seen = Transcript {
        hello: &hello,
        version: challenge.version,
        features: challenge.features,
        server_nonce: &challenge.nonce,
        wish: &proof.wish(),
    };
    proof.session_proof = Key::of_session(&record.secret).prove(Role::Session, seen);
    stream.write_all(&frame(&proof.message(), b"")).unwrap();
    let welcome = Welcome::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
    assert!(welcome.resumed);
    stream.write_all(&frame(&identity(0), b"")).unwrap();
    stream
}

/// The notes that a server makes of these changes, and has answered.
fn noted(journal: &MemoryJournal) -> (SessionRecord, Vec<(u32, Op, Vec<u8>)>) {
    let (record, log) = journal.load().into_iter().next().unwrap();
    let begun = log.records().into_iter().map(|(slot, record)| {
        let SlotRecord::Answer { begun: Some((op, mut intent)), .. } = record else {
            panic!("slot {slot}: nothing was noted: {record:?}")
        };
        // The time when it was noted is another each time.
        if matches!(op, Op::Make | Op::Create | Op::Put) {
            let time_at = intent.len() - 12;
            intent[time_at..].fill(0);
        }
        (slot, op, intent)
    });
    (record, begun.collect())
}

/// A server notes what it always has, and finds out what came of its own notes and of those of a
/// former server. No change is made twice.
// proves: P137
#[test]
fn intents_are_what_they_were_and_are_settled() {
    run(async {
        let fs = files().await;
        let (cx, root) = (Context::system(), fs.info().root);
        let mut ids = Vec::new();
        for text in FILES {
            ids.push(fs.lookup(&cx, root, name(text)).await.unwrap().id);
        }
        let all = changes(root, |text| ids[number(text) as usize]);
        let journal = MemoryJournal::default();
        let (changes, opened) = (all.clone(), ids.clone());
        served(&fs, &journal, move |socket| {
            let (mut stream, _) = handshake(socket).unwrap();
            open_all(&mut stream, &opened, false);
            make_all(&mut stream, &changes);
        })
        .await;
        check(&fs).await;

        let (record, intents) = noted(&journal);
        assert_eq!(intents.len(), all.len());
        for version in ["intents-2.txt", "intents-1.txt"] {
            let (next, mut written) = (MemoryJournal::default(), Written::in_file(version));
            let cut_short = next.create(&record, 64).unwrap();
            for (slot, op, intent) in &intents {
                let line = format!("{slot}:{}", op.name());
                let changed = matches!(op, Op::Make | Op::Create | Op::Link | Op::Put);
                let then = match (version, changed) {
                    ("intents-1.txt", true) => written.formerly(&line),
                    ("intents-1.txt", false) | (_, true) => written.same(&line, intent),
                    (_, false) => intent.clone(), // as before
                };
                cut_short.begin(*slot, 1, *op, &then);
            }
            written.end();
            let (record, ids, all) = (record.clone(), ids.clone(), all.clone());
            served(&fs, &next, move |socket| {
                let mut stream = handshake_again(socket, &record);
                open_all(&mut stream, &ids, true);
                make_all(&mut stream, &all);
            })
            .await;
            check(&fs).await;
        }
    });
}
