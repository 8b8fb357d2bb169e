//! A request that stays on one server of a projection makes the calls that it makes at a mount of that server alone.
//!
//! Requests are those of a kernel: a name is looked up by the thread that uses it next.

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileId, FileSystem, Identity, Make, Name, NodeId,
    OpenFile, OpenHow, Pid, RemoveKind, RenameHow, RequestId, Result, SetAttr, Write, XattrSet,
};
use dray_layers::placement::{FilePlaces, Placement, placed_stack};
use dray_rpc::client::{ClientSession, RemoteFs};
use dray_testkit::fixture::simulate;

use crate::site::{placement_over, server_of, sessions_with};

const LAYOUT: &str = "layout = \"cluster\"";

/// Repetitions of each request: with two servers some of the files are at the server of their names.
const TIMES: u64 = 16;

/// A client whose calls are counted.
struct Counted {
    fs: Arc<dyn FileSystem>,
    sessions: Vec<Arc<ClientSession>>,
    /// None at a mount of one server.
    placement: Option<Placement>,
    places: Arc<FilePlaces>,
}

impl Counted {
    /// Of a projection over so many servers of these files; none: of a server alone.
    async fn new(below: &Arc<dyn FileSystem>, servers: Option<usize>) -> Counted {
        let all = (0..servers.unwrap_or(1)).map(|_| server_of(below.clone())).collect();
        let placement = servers.map(|servers| placement_over(servers, LAYOUT));
        Counted::worker(sessions_with(all).await, placement, Arc::default())
    }

    /// A worker of a mount with these sessions.
    fn worker(
        sessions: Vec<Arc<ClientSession>>,
        placement: Option<Placement>,
        places: Arc<FilePlaces>,
    ) -> Counted {
        let fs: Arc<dyn FileSystem> = match &placement {
            None => Arc::new(RemoteFs::new(sessions[0].clone())),
            Some(placement) => {
                let stacks = sessions.iter().map(|one| RemoteFs::stack(one.clone())).collect();
                placed_stack(placement.clone(), places.clone(), stacks, Vec::new()).fs
            }
        };
        Counted { fs, sessions, placement, places }
    }

    /// Another worker of the same mount.
    fn beside(&self) -> Counted {
        Counted::worker(self.sessions.clone(), self.placement.clone(), self.places.clone())
    }

    fn node(&self) -> NodeId {
        self.sessions[0].node()
    }

    fn calls(&self) -> u64 {
        let status = self.sessions.iter().map(|session| session.status());
        status.flat_map(|one| one.channels).map(|channel| channel.calls).sum()
    }

    /// Whether a file is at home where the names of its directory are.
    fn stays(&self, dir: FileId, file: FileId) -> bool {
        self.placement.as_ref().is_none_or(|placed| placed.home(file) == placed.directory(dir))
    }
}

/// One thread of a program, and what it works on.
struct Program<'a> {
    site: &'a Counted,
    thread: Pid,
    next: u64,
}

fn files() -> Arc<dyn FileSystem> {
    Arc::new(MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() }))
}

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

impl<'a> Program<'a> {
    fn of(site: &'a Counted) -> Program<'a> {
        Program { site, thread: Pid(7), next: 0 }
    }

    fn fs(&self) -> &dyn FileSystem {
        &*self.site.fs
    }

    fn root(&self) -> FileId {
        self.fs().info().root
    }

    /// The next request, numbered as the kernel does.
    fn cx(&mut self) -> Context {
        self.next += 2;
        Context::new(self.site.node(), RequestId(self.next), Identity::system(), self.thread)
    }

    async fn look(&mut self, text: &str) -> Result<FileId> {
        let cx = self.cx();
        Ok(self.fs().lookup(&cx, self.root(), name(text)).await?.id)
    }

    async fn create(&mut self, text: &str, flags: i32) -> (FileId, Arc<dyn OpenFile>) {
        let (cx, open) = (self.cx(), OpenHow::new(libc::O_RDWR | flags));
        let how = CreateHow { open, mode: 0o644, exclusive: flags & libc::O_EXCL != 0 };
        let (entry, file) = self.fs().create(&cx, self.root(), name(text), how).await.unwrap();
        (entry.id, file)
    }

    /// Makes a file, which nobody has open.
    async fn file(&mut self, text: &str) -> FileId {
        let (id, file) = self.create(text, libc::O_EXCL).await;
        self.close(&*file).await;
        id
    }

    async fn close(&mut self, file: &dyn OpenFile) {
        let cx = self.cx();
        file.close(&cx).await.unwrap();
    }

    async fn make(&mut self, text: &str, what: Make<'_>) -> FileId {
        assert_eq!(self.look(text).await.unwrap_err().errno(), Errno::ENOENT);
        let cx = self.cx();
        self.fs().make(&cx, self.root(), name(text), what).await.unwrap().id
    }

    async fn remove(&mut self, text: &str, kind: RemoveKind) {
        self.look(text).await.unwrap();
        let cx = self.cx();
        self.fs().remove(&cx, self.root(), name(text), kind).await.unwrap();
    }

    async fn rename(&mut self, from: &str, to: &str, how: RenameHow) {
        self.look(from).await.unwrap();
        let _ = self.look(to).await; // it may be absent
        let (cx, root) = (self.cx(), self.root());
        self.fs().rename(&cx, (root, name(from)), (root, name(to)), how).await.unwrap();
    }

    /// Prepares `what`, has it counted, and answers whether all that it works on is at one server.
    async fn request(&mut self, what: &str, number: u64) -> (bool, u64) {
        let (one, other) = (format!("one{number}"), format!("other{number}"));
        let (one, other) = (one.as_str(), other.as_str());
        let made = match what {
            "make" | "create" | "create, cut" | "mkdir" | "symlink" | "listing" => self.root(),
            "rmdir" => self.make(one, Make::Directory { mode: 0o755 }).await,
            _ => self.file(one).await,
        };
        let replaced = match what {
            "rename, replacing" | "exchange" => self.file(other).await,
            _ => self.root(),
        };
        let opened = match what {
            "read" | "write" => {
                let cx = self.cx();
                Some(self.fs().open(&cx, made, OpenHow::READ_WRITE).await.unwrap())
            }
            _ => None,
        };
        let before = self.site.calls();
        let found = self.counted(what, (one, other), made, opened.as_deref()).await;
        let calls = self.site.calls() - before;
        if let Some(file) = opened {
            self.close(&*file).await;
        }
        let files = [made, replaced, found].into_iter().filter(|file| *file != self.root());
        let stay = files.filter(|file| !self.site.stays(self.root(), *file)).count() == 0;
        (stay || what == "mkdir", calls)
    }

    /// The requests that are counted. Answers the file that they have made.
    async fn counted(
        &mut self,
        what: &str,
        (one, other): (&str, &str),
        made: FileId,
        opened: Option<&dyn OpenFile>,
    ) -> FileId {
        let root = self.root();
        match what {
            "stat" => return self.look(one).await.unwrap(),
            "unlink" => self.remove(one, RemoveKind::File).await,
            "rmdir" => self.remove(one, RemoveKind::Directory).await,
            "rename" => self.rename(one, other, RenameHow::Replace).await,
            "rename, replacing" => self.rename(one, other, RenameHow::Replace).await,
            "exchange" => self.rename(one, other, RenameHow::Exchange).await,
            "mkdir" => return self.make(one, Make::Directory { mode: 0o755 }).await,
            "symlink" => return self.make(one, Make::Symlink { target: b"there" }).await,
            "make" => return self.make(one, Make::Node { mode: 0o100_644, rdev: 0 }).await,
            "create" | "create, cut" => {
                let flags = if what == "create" { libc::O_EXCL } else { libc::O_TRUNC };
                assert_eq!(self.look(one).await.unwrap_err().errno(), Errno::ENOENT);
                let (id, file) = self.create(one, flags).await;
                self.close(&*file).await;
                return id;
            }
            _ => self.of_a_file(what, other, made, opened).await,
        }
        root
    }

    async fn of_a_file(
        &mut self,
        what: &str,
        other: &str,
        id: FileId,
        opened: Option<&dyn OpenFile>,
    ) {
        let (cx, root) = (self.cx(), self.root());
        let fs = self.site.fs.clone();
        match (what, opened) {
            ("read", Some(file)) => drop(file.read(&cx, 0, BufMut::heap(4096)).await),
            ("write", Some(file)) => {
                let data = Buf::from(vec![1; 4096]);
                assert_eq!(file.write(&cx, Write::at(0), data).await.unwrap(), 4096);
            }
            ("open and close", None) => {
                let file = fs.open(&cx, id, OpenHow::READ).await.unwrap();
                self.close(&*file).await;
            }
            ("open, cut", None) => {
                let how = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
                let file = fs.open(&cx, id, how).await.unwrap();
                self.close(&*file).await;
            }
            ("open of a name", None) => {
                let text = other.replace("other", "one");
                let place = (root, name(&text));
                let file = fs.open_named(&cx, place, id, OpenHow::READ).await.unwrap();
                self.close(&*file).await;
            }
            ("link", None) => {
                assert_eq!(self.look(other).await.unwrap_err().errno(), Errno::ENOENT);
                let cx = self.cx();
                fs.link(&cx, id, root, name(other)).await.unwrap();
            }
            ("setattr", None) => {
                let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
                fs.setattr(&cx, id, set).await.unwrap();
            }
            ("getattr", None) => assert_eq!(fs.getattr(&cx, id).await.unwrap().nlink, 1),
            ("xattr", None) => {
                fs.setxattr(&cx, id, b"user.a", b"1", XattrSet::Any).await.unwrap();
                assert_eq!(fs.getxattr(&self.cx(), id, b"user.a").await.unwrap(), b"1");
                assert_eq!(fs.listxattr(&self.cx(), id).await.unwrap(), b"user.a\0");
                fs.removexattr(&self.cx(), id, b"user.a").await.unwrap();
            }
            ("listing", None) => {
                let dir = fs.open(&cx, root, OpenHow::DIRECTORY).await.unwrap();
                let page = dir.readdir(&self.cx(), 0, 4096, false).await.unwrap();
                assert!(page.iter().next().is_some());
                self.close(&*dir).await;
            }
            _ => panic!("no request is called {what}"),
        }
    }
}

/// What [`Program::counted`] counts.
const REQUESTS: [&str; 21] = [
    "stat",
    "getattr",
    "setattr",
    "xattr",
    "open and close",
    "open of a name",
    "open, cut",
    "read",
    "write",
    "create",
    "create, cut",
    "make",
    "mkdir",
    "symlink",
    "link",
    "rename",
    "rename, replacing",
    "exchange",
    "listing",
    "rmdir",
    "unlink",
];

/// Calls for each repetition of `what`, and whether it stayed on one server.
fn calls(servers: Option<usize>, what: &str) -> Vec<(bool, u64)> {
    simulate(1, async {
        let site = Counted::new(&files(), servers).await;
        let mut program = Program::of(&site);
        let _ = program.file("first").await; // so that no listing is empty
        let mut counts = Vec::new();
        for number in 0..TIMES {
            counts.push(program.request(what, number).await);
        }
        counts
    })
}

// proves: P320
#[test]
fn what_stays_on_one_server_of_a_projection_makes_the_calls_of_a_mount_of_one_server() {
    let mut more = Vec::new();
    for what in REQUESTS {
        let alone: Vec<u64> = calls(None, what).into_iter().map(|(_, calls)| calls).collect();
        for servers in [1, 2] {
            let placed = calls(Some(servers), what);
            let stayed = placed.iter().zip(&alone).filter(|((stays, _), _)| *stays);
            let counts: Vec<(u64, u64)> =
                stayed.map(|((_, placed), alone)| (*placed, *alone)).collect();
            assert!(!counts.is_empty(), "{what}: nothing stayed on one of {servers} servers");
            if counts.iter().any(|(placed, alone)| placed > alone) {
                more.push(format!("{what} over {servers}: {counts:?}"));
            }
        }
    }
    assert!(more.is_empty(), "calls, and those of a server alone:\n{}", more.join("\n"));
}

/// The worker that makes the files is not the one that opens them, as where a program moves to another CPU.
// proves: P348
#[test]
fn a_mount_knows_where_thousands_of_files_are_at_home() {
    const FILES: usize = 3000;
    let calls_of_an_open = |servers| {
        simulate(1, async {
            let maker = Counted::new(&files(), servers).await;
            let mut program = Program::of(&maker);
            let names: Vec<String> = (0..FILES).map(|number| format!("file{number}")).collect();
            for name in &names {
                program.file(name).await;
            }
            let opener = maker.beside();
            let mut program = Program::of(&opener);
            let (mut stayed, mut calls) = (0, 0);
            for name in &names {
                let before = opener.calls();
                let id = program.look(name).await.unwrap();
                let cx = program.cx();
                let file = program.fs().open(&cx, id, OpenHow::READ).await.unwrap();
                if opener.stays(program.root(), id) {
                    (stayed, calls) = (stayed + 1, calls + opener.calls() - before);
                }
                program.close(&*file).await;
            }
            assert!(stayed > FILES / 3, "{stayed}");
            calls as f64 / stayed as f64
        })
    };
    let (alone, placed) = (calls_of_an_open(None), calls_of_an_open(Some(2)));
    assert!(
        placed <= alone + 0.01,
        "{placed} calls for each open, and {alone} at one server alone"
    );
}

/// The name's server and the home are asked for the name, one removes it, and the home learns of that.
// proves: P320
#[test]
fn a_file_that_is_at_home_elsewhere_is_not_looked_up_again_to_be_removed() {
    let placed = calls(Some(2), "unlink");
    let away: Vec<u64> =
        placed.into_iter().filter(|(stays, _)| !*stays).map(|(_, calls)| calls).collect();
    assert!(!away.is_empty() && away.iter().all(|calls| *calls == 4), "{away:?}");
}

/// What a thread has found is a guess by the time of the change: another client may have been faster.
// proves: P320
#[test]
fn what_another_client_puts_in_place_of_what_was_looked_up_is_removed_and_cut() {
    simulate(1, async {
        let below = files();
        let sites = [Counted::new(&below, Some(2)).await, Counted::new(&below, Some(2)).await];
        let [mut one, mut other] = sites.each_ref().map(Program::of);
        for number in 0..TIMES {
            let (old, new) = (format!("old{number}"), format!("new{number}"));
            one.file(&old).await;
            one.look(&old).await.unwrap();
            let other_file = other.file(&new).await;
            other.rename(&new, &old, RenameHow::Replace).await;
            let (cx, root) = (one.cx(), one.root());
            one.fs().remove(&cx, root, name(&old), RemoveKind::File).await.unwrap();
            assert_eq!(other.look(&old).await.unwrap_err().errno(), Errno::ENOENT);
            let (cx, gone) = (other.cx(), Errno::ESTALE);
            assert_eq!(other.fs().getattr(&cx, other_file).await.unwrap_err().errno(), gone);

            assert_eq!(one.look(&new).await.unwrap_err().errno(), Errno::ENOENT);
            let (id, file) = other.create(&new, libc::O_EXCL).await;
            let cx = other.cx();
            file.write(&cx, Write::at(0), Buf::from(vec![1; 100])).await.unwrap();
            other.close(&*file).await;
            let (same, file) = one.create(&new, libc::O_TRUNC).await;
            let cx = one.cx();
            assert_eq!((same, one.fs().getattr(&cx, id).await.unwrap().size), (id, 0));
            one.close(&*file).await;
        }
    });
}
