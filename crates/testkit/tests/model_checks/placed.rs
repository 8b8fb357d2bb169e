//! A projection over three servers that share a file system keeps what one server keeps.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Admit, Buf, BufMut, Context, CreateHow, Errno, FileSystem, Identity, Name, ObservedCall, Op,
    OpenHow, Pid, RequestId, Write,
};
use dray_layers::placement::{Placement, parse_definitions, placed_stack};
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::client::RemoteFs;
use dray_rt::{DriverKind, Executor};
use dray_testkit::conformance::{OptionalFeatures, suite};
use dray_testkit::fixture::{Ext4, Tmpfs, block_on, skipped_without_root};
use dray_testkit::model::Quirks;

use crate::site::{
    agree, connected, failing, generated, placed, placement_over, posix, server_of, sessions_with,
};

const SERVERS: usize = 3;
const STRIPED: &str = "layout = \"cluster-stripe\"\nstripe = \"4K\"";
const LEASED: &str = "layout = \"cluster\"\nleases = true";
const LAYOUTS: [&str; 9] = [
    LEASED,
    "layout = \"cluster\"",
    STRIPED,
    "layout = \"cluster\"\nspread_creates = true",
    "layout = \"cluster-stripe\"\nstripe = \"8K\"\nwidth = 2\nspread_creates = true",
    "layout = \"cluster\"\ndata_hash = \"modulo\"\nmeta_hash = \"jenkins\"",
    "layout = \"cluster\"\ndata_hash = \"fnv-1a\"",
    "layout = \"cluster\"\nfailover = true",
    "layout = \"cluster-stripe\"\nstripe = \"4K\"\nfailover = true\nspread_creates = true",
];

const ON_TMPFS: OptionalFeatures =
    OptionalFeatures { zero_range: false, shift_range: false, ..OptionalFeatures::ALL };

type Stack = Arc<dyn FileSystem>;

fn memory() -> Vec<Stack> {
    let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
    let fs: Stack = Arc::new(MemoryFs::new(options));
    vec![fs; SERVERS]
}

/// As many servers as there would be processes: nothing in them is shared but the directory.
fn posix_servers(root: &Path) -> Vec<Stack> {
    (0..SERVERS).map(|_| posix(root) as Stack).collect()
}

// proves: P139
#[test]
fn a_cluster_of_memory_keeps_its_promises() {
    for layout in LAYOUTS {
        for clients in [1, 2] {
            block_on(async {
                suite(&placed(memory(), clients, layout).await, OptionalFeatures::ALL).await
            });
        }
    }
}

#[test]
fn two_clients_of_a_cluster_of_memory_agree_with_the_model() {
    for layout in &LAYOUTS[..3] {
        generated(60, |steps| {
            block_on(async { agree(placed(memory(), 2, layout).await, Quirks::NONE, steps).await })
        });
    }
}

fn on_posix_it_keeps_its_promises(root: &Path, offers: OptionalFeatures) {
    for (number, layout) in LAYOUTS[..3].iter().enumerate() {
        let dir = root.join(number.to_string());
        std::fs::create_dir(&dir).unwrap();
        block_on(async { suite(&placed(posix_servers(&dir), 2, layout).await, offers).await });
        dray_backends::posix::release().unwrap();
    }
}

#[test]
fn a_cluster_over_tmpfs_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    on_posix_it_keeps_its_promises(tmpfs.path(), ON_TMPFS);
}

// proves: P139
#[test]
fn a_cluster_over_ext4_keeps_its_promises() {
    if skipped_without_root() {
        return;
    }
    let ext4 = Ext4::new(64 << 20, "").unwrap();
    on_posix_it_keeps_its_promises(ext4.path(), OptionalFeatures::ALL);
}

/// Three clients of servers over a tmpfs.
fn three_clients(layout: &str, cases: u32) {
    if skipped_without_root() {
        return;
    }
    let tmpfs = Tmpfs::new(64 << 20).unwrap();
    generated(cases, |steps| {
        let words = |error: std::io::Error| error.to_string();
        let dir = tmpfs.path().join("case");
        std::fs::create_dir(&dir).map_err(words)?;
        let result = block_on(async {
            let clients = placed(posix_servers(&dir), 3, layout).await;
            agree(clients, Quirks::served(), steps).await
        });
        dray_backends::posix::release().map_err(|error| error.to_string())?;
        std::fs::remove_dir_all(&dir).map_err(words)?;
        result
    });
}

// proves: P139
#[test]
fn three_clients_of_a_cluster_over_tmpfs_agree_with_the_model() {
    three_clients(LAYOUTS[1], 60);
}

// proves: P271
#[test]
fn three_clients_of_a_cluster_that_leases_agree_with_the_model() {
    three_clients(LEASED, 40);
}

/// Three blocks of 4 KiB, written and read by one client with `failing` at the servers that are not the
/// file's home. Answers what was read of the whole and of the first block.
async fn through_failing(op: Op, errno: Errno) -> (Result<Vec<u8>, Errno>, Result<Vec<u8>, Errno>) {
    let placement = striped_placement();
    let fs = memory().remove(0);
    let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
    let (entry, made) = fs.create(&cx, fs.info().root, name, how).await.unwrap();
    made.close(&cx).await.unwrap();
    let home = usize::from(placement.home(entry.id).0);
    let servers = (0..SERVERS).map(|server| match server == home {
        true => fs.clone(),
        false => failing(fs.clone(), op, errno),
    });
    let client = placed(servers.collect(), 1, STRIPED).await.remove(0);
    let file = client.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
    let content: Vec<u8> = (0..12_288_u32).map(|at| (at % 251) as u8).collect();
    file.write(&cx, Write::at(0), Buf::from(content)).await.map_err(|error| error.errno()).ok();
    let mut found = Vec::new();
    for bytes in [12_288, 4096] {
        let read = file.read(&cx, 0, BufMut::heap(bytes)).await;
        found.push(read.map(|read| read.filled().to_vec()).map_err(|(error, _)| error.errno()));
    }
    file.close(&cx).await.unwrap();
    let first = found.pop().unwrap();
    (found.pop().unwrap(), first)
}

/// A program may sync through another descriptor than it writes through.
// proves: P150
#[test]
fn a_sync_reaches_every_server_that_can_have_a_block() {
    for (layout_bytes, fails) in [(12_288_usize, true), (4096, false)] {
        let outcome = block_on(async {
            let (placement, fs) = (striped_placement(), memory().remove(0));
            let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
            let (entry, made) = fs.create(&cx, fs.info().root, name, how).await.unwrap();
            made.write(&cx, Write::at(0), Buf::from(vec![1; layout_bytes])).await.unwrap();
            made.close(&cx).await.unwrap();
            let home = usize::from(placement.home(entry.id).0);
            let servers = (0..SERVERS).map(|server| match server == home {
                true => fs.clone(),
                false => failing(fs.clone(), Op::Sync, Errno::EIO),
            });
            let client = placed(servers.collect(), 1, STRIPED).await.remove(0);
            let file = client.open(&cx, entry.id, OpenHow::READ).await.unwrap();
            let outcome = file.sync(&cx, false).await.map_err(|error| error.errno());
            let _ = file.close(&cx).await;
            outcome
        });
        assert_eq!(outcome, if fails { Err(Errno::EIO) } else { Ok(()) }, "{layout_bytes}");
    }
}

/// Notes each change with its request.
#[derive(Default)]
struct Requests(Mutex<Vec<(RequestId, Op)>>);

impl Observer for Requests {
    fn admits(&self) -> bool {
        false
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn done(&self, cx: &Context, call: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {
        if matches!(call.op, Op::Create | Op::Setattr) {
            self.0.lock().unwrap().push((cx.origin.request, call.op));
        }
    }
}

/// A mount daemon was killed between the making of a file and the cut of it. The next one took the answer to
/// the cut for that to the making, and an application saw EPROTO.
// proves: P141
#[test]
fn no_two_changes_of_a_request_at_one_server_have_the_same_number() {
    let (mut cuts, mut all) = (0, HashSet::new());
    block_on(async {
        let servers = memory().into_iter().map(server_of).collect();
        let mut sessions = connected(servers, 1).await.remove(0);
        let requests: Vec<Arc<Requests>> = (0..SERVERS).map(|_| Arc::default()).collect();
        for (session, requests) in sessions.iter_mut().zip(&requests) {
            session.fs = Arc::new(Observed::new(session.fs.clone(), requests.clone()));
        }
        let placement = placement_over(SERVERS, LAYOUTS[1]);
        let fs = placed_stack(placement, Arc::default(), sessions, Vec::new()).fs;
        let open = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
        let how = CreateHow { open, mode: 0o644, exclusive: false };
        for number in 1..40_u64 {
            let mut cx = Context::system();
            cx.origin.request = RequestId(number);
            let name = Name::new(format!("f{number}").as_bytes()).unwrap().to_owned();
            let (_, file) = fs.create(&cx, fs.info().root, &name, how).await.unwrap();
            file.close(&cx).await.unwrap();
        }
        for (server, requests) in requests.iter().enumerate() {
            for (request, op) in requests.0.lock().unwrap().iter() {
                cuts += usize::from(*op == Op::Setattr);
                assert!(all.insert((server, *request)), "{server} {request:?} {op:?}");
            }
        }
    });
    assert!(cuts > 0);
}

fn striped_placement() -> Placement {
    let text = format!(
        "[projection.x]\nservers = [\"tcp://io1\", \"tcp://io2\", \"tcp://io3\"]\npath = \"/\"\n\
         {STRIPED}"
    );
    Placement::new(&parse_definitions(&text).unwrap()[0])
}

/// A block is used at its own server. Where that one cannot open the file, its home has all blocks.
// proves: P150
#[test]
fn blocks_are_used_at_their_servers_and_at_home_where_those_cannot_open_the_file() {
    let content: Vec<u8> = (0..12_288_u32).map(|at| (at % 251) as u8).collect();
    let (whole, first) = block_on(through_failing(Op::Read, Errno::EIO));
    assert_eq!((whole, first), (Err(Errno::EIO), Ok(content[..4096].to_vec())));
    // Both further servers have lost the file, which two parts of one request find out at once.
    let (whole, first) = block_on(through_failing(Op::Read, Errno::ESTALE));
    assert_eq!((whole, first), (Ok(content.clone()), Ok(content[..4096].to_vec())));
    for errno in [Errno::ESTALE, Errno::EACCES, Errno::ENFILE] {
        let (whole, first) = block_on(through_failing(Op::Open, errno));
        assert_eq!((whole, first), (Ok(content.clone()), Ok(content[..4096].to_vec())));
    }
}

/// A file is opened ahead by its home, when that gives the attributes, also where another server has the name. Such an
/// open was a call more.
// proves: P250
#[test]
fn an_open_of_a_known_name_asks_the_server_of_the_name_and_the_home() {
    const FILES: u64 = 24;
    const ROUNDS: u64 = 8;
    let mut simulation = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
    let (calls, opened_ahead) = simulation.block_on(async {
        let sessions = sessions_with(memory().into_iter().map(server_of).collect()).await;
        let stacks = sessions.iter().map(|session| RemoteFs::stack(session.clone())).collect();
        let placement = placement_over(SERVERS, LAYOUTS[1]);
        let fs = placed_stack(placement, Arc::default(), stacks, Vec::new()).fs;
        let (root, mut request) = (fs.info().root, 0);
        let mut cx = || {
            request += 2; // as the kernel numbers its requests
            let node = sessions[0].node();
            Context::new(node, RequestId(request), Identity::system(), Pid(7))
        };
        let names: Vec<_> = (0..FILES).map(|number| format!("f{number}")).collect();
        let names: Vec<_> = names.iter().map(|name| Name::new(name.as_bytes()).unwrap()).collect();
        for name in &names {
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
            let (_, file) = fs.create(&cx(), root, name, how).await.unwrap();
            file.close(&cx()).await.unwrap();
        }
        let status = || sessions.iter().map(|session| session.status());
        let calls =
            || -> u64 { status().flat_map(|one| one.channels).map(|channel| channel.calls).sum() };
        let mut before = 0;
        for round in 0..2 * ROUNDS {
            if round == ROUNDS {
                before = calls();
            }
            for name in &names {
                let entry = fs.lookup(&cx(), root, name).await.unwrap();
                let file = fs.open(&cx(), entry.id, OpenHow::READ).await.unwrap();
                file.close(&cx()).await.unwrap();
            }
        }
        (calls() - before, status().filter(|one| one.open_ahead.used > 0).count())
    });
    // A quarter of a call for those that the simulation holds up until it is too late.
    let opens = ROUNDS * FILES;
    assert!((opens..=opens * 9 / 4).contains(&calls), "{calls} calls for {opens} opens");
    assert_eq!(opened_ahead, SERVERS, "each is home to some files");
}

/// The file system below the home may not know the name yet, or an old file by it.
// proves: P250
#[test]
fn a_home_that_does_not_find_the_name_is_asked_by_the_id() {
    block_on(async {
        let placement = placement_over(SERVERS, LAYOUTS[1]);
        let fs = memory().remove(0);
        let (cx, root) = (Context::system(), fs.info().root);
        let names_at = usize::from(placement.directory(root).0);
        let servers = (0..SERVERS).map(|server| match server == names_at {
            true => fs.clone(),
            false => failing(fs.clone(), Op::Lookup, Errno::ENOENT),
        });
        let client = placed(servers.collect(), 1, LAYOUTS[1]).await.remove(0);
        let mut away = 0;
        for number in 0..20 {
            let name = Name::new(format!("f{number}").as_bytes()).unwrap().to_owned();
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o640, exclusive: true };
            let (entry, file) = client.create(&cx, root, &name, how).await.unwrap();
            file.close(&cx).await.unwrap();
            away += usize::from(usize::from(placement.home(entry.id).0) != names_at);
            let found = client.lookup(&cx, root, &name).await.unwrap();
            assert_eq!((found.id, found.attr.mode & 0o777), (entry.id, 0o640));
        }
        assert!(away > 0);
    });
}

/// The types of both come before how they are open, as on one server.
// proves: P139
#[test]
fn a_copy_from_or_to_a_directory_of_another_server_is_eisdir() {
    block_on(async {
        let client = placed(memory(), 1, LAYOUTS[1]).await.remove(0);
        let (cx, root) = (Context::system(), client.info().root);
        let placement = placement_over(SERVERS, LAYOUTS[1]);
        let directory = client.open(&cx, root, OpenHow::DIRECTORY).await.unwrap();
        let mut away = 0;
        for number in 0..12 {
            let name = Name::new(format!("f{number}").as_bytes()).unwrap().to_owned();
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o640, exclusive: true };
            let (entry, file) = client.create(&cx, root, &name, how).await.unwrap();
            away += usize::from(placement.home(entry.id) != placement.directory(root));
            for (from, to) in [(&file, &directory), (&directory, &file)] {
                let error = from.copy_range(&cx, 0, &**to, 0, 10).await.unwrap_err();
                assert_eq!(error.errno(), Errno::EISDIR);
            }
            file.close(&cx).await.unwrap();
        }
        assert!(away > 0);
        directory.close(&cx).await.unwrap();
    });
}
