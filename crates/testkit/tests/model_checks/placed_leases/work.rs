//! What clients change and look at, and what they saw.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_backends::memory::MemoryDisk;
use dray_core::{
    Context, CreateHow, Errno, FileId, FileSystem, FileType, Make, Name, OpenHow, RemoveKind,
    RenameHow, Timestamp,
};
use dray_layers::placement::Placement;
use dray_rt::sleep;
use dray_testkit::simulator::{HistoryEvent, RegisterOp};

use super::client::Client;
use super::{CLIENTS, SERVERS, pick};

/// Operations of each client. A history of one thing has no more than 128.
const OPERATIONS: usize = 128 / CLIENTS;
/// In each directory: a name that stands for one file or another.
const GIVEN: &str = "given";

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// What is changed and looked at.
#[derive(Clone, Copy)]
pub enum Subject {
    /// The file that a directory's name stands for.
    Given(usize),
    /// How many names a file has. It gets a second one in another directory, and loses that.
    Links(usize),
    /// When a file's attributes changed. One client alone moves it.
    Moved(usize),
}

impl Subject {
    pub const COUNT: usize = 2 * SERVERS + CLIENTS;

    fn any() -> Subject {
        match pick(Subject::COUNT as u64) as usize {
            one if one < SERVERS => Subject::Given(one),
            one if one < 2 * SERVERS => Subject::Links(one - SERVERS),
            one => Subject::Moved(one - 2 * SERVERS),
        }
    }

    fn number(self) -> usize {
        match self {
            Subject::Given(one) => one,
            Subject::Links(one) => SERVERS + one,
            Subject::Moved(one) => 2 * SERVERS + one,
        }
    }
}

/// The work of all clients, and what came of it.
#[derive(Default)]
pub struct Work {
    /// How long a client rests at most.
    pause: Duration,
    /// One at each server.
    dirs: Vec<FileId>,
    /// The files of `Links` and `Moved`.
    linked: Vec<FileId>,
    moved: Vec<FileId>,
    ticks: AtomicU64,
    /// Moves of each file that have been asked for.
    moves: Mutex<[usize; CLIENTS]>,
    pub histories: [Mutex<Vec<HistoryEvent>>; Subject::COUNT],
}

fn nanos(time: Timestamp) -> u64 {
    time.sec as u64 * 1_000_000_000 + u64::from(time.nsec)
}

/// The directories before and behind the move of this number.
fn way(number: usize) -> (usize, usize) {
    (number % SERVERS, (number + 1) % SERVERS)
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

impl Work {
    /// Directories at three servers, with the files that are linked and moved.
    pub async fn prepare(disk: &MemoryDisk, placement: &Placement, pause: Duration) -> Work {
        let (fs, cx) = (disk.mount(), Context::system());
        let mut dirs: [Option<FileId>; SERVERS] = [None; SERVERS];
        for number in 0.. {
            let made = format!("dir{number}");
            let what = Make::Directory { mode: 0o755 };
            let id = fs.make(&cx, fs.info().root, name(&made), what).await.unwrap().id;
            dirs[usize::from(placement.directory(id).0)].get_or_insert(id);
            if dirs.iter().all(Option::is_some) {
                break;
            }
        }
        let dirs: Vec<FileId> = dirs.into_iter().flatten().collect();
        let mut work = Work { pause, dirs, ..Work::default() };
        for number in 0..SERVERS {
            // Their attributes are not at the server of the name.
            let at = usize::from(placement.directory(work.dirs[number]).0);
            for (text, files) in [("linked", &mut work.linked), ("moved", &mut work.moved)] {
                let text = format!("{text}{number}");
                loop {
                    let dir = if text.starts_with('m') { work.dirs[0] } else { work.dirs[number] };
                    let (entry, file) = fs.create(&cx, dir, name(&text), NEW).await.unwrap();
                    file.close(&cx).await.unwrap();
                    if usize::from(placement.home(entry.id).0) != at {
                        files.push(entry.id);
                        break;
                    }
                    fs.remove(&cx, dir, name(&text), RemoveKind::File).await.unwrap();
                }
            }
        }
        for number in 0..SERVERS {
            let subjects = [
                (Subject::Links(number), 1),
                (
                    Subject::Moved(number),
                    nanos(fs.getattr(&cx, work.moved[number]).await.unwrap().ctime),
                ),
            ];
            for (subject, value) in subjects {
                let begun = work.begin(subject, value);
                work.end(subject, begun, RegisterOp::Write(value));
            }
        }
        work
    }

    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn history(&self, subject: Subject) -> std::sync::MutexGuard<'_, Vec<HistoryEvent>> {
        self.histories[subject.number()].lock().unwrap()
    }

    fn begin(&self, subject: Subject, value: u64) -> usize {
        let (from, kind) = (self.tick(), RegisterOp::Write(value));
        let mut events = self.history(subject);
        events.push(HistoryEvent { from, to: u64::MAX, kind, optional: true });
        events.len() - 1
    }

    fn end(&self, subject: Subject, index: usize, kind: RegisterOp) {
        let to = self.tick();
        let event = &mut self.history(subject)[index];
        (event.to, event.kind, event.optional) = (to, kind, false);
    }

    async fn look(&self, client: &Client, subject: Subject) {
        let cx = client.cx();
        match subject {
            Subject::Given(dir) => {
                let from = self.tick();
                let found = match pick(3) {
                    0 => listed(client, self.dirs[dir]).await,
                    _ => match client.fs.lookup(&cx, self.dirs[dir], name(GIVEN)).await {
                        Ok(entry) => entry.id.ino,
                        Err(error) => absent(error),
                    },
                };
                self.read(subject, from, found);
            }
            Subject::Links(number) => {
                self.find(client, (number, "linked", number)).await;
                let from = self.tick();
                let attr = client.fs.getattr(&cx, self.linked[number]).await.unwrap();
                self.read(subject, from, attr.nlink.into());
            }
            Subject::Moved(number) => {
                let dir = pick(SERVERS as u64) as usize;
                self.find(client, (dir, "moved", number)).await;
                let from = self.tick();
                let attr = client.fs.getattr(&cx, self.moved[number]).await.unwrap();
                self.read(subject, from, nanos(attr.ctime));
            }
        }
    }

    /// By a name attributes are leased.
    async fn find(&self, client: &Client, (dir, text, number): (usize, &str, usize)) {
        let text = format!("{text}{number}");
        let found = client.fs.lookup(&client.cx(), self.dirs[dir], name(&text)).await;
        found.map(drop).map_err(absent).ok();
    }

    fn read(&self, subject: Subject, from: u64, found: u64) {
        let (to, kind) = (self.tick(), RegisterOp::Read(found));
        self.history(subject).push(HistoryEvent { from, to, kind, optional: false });
    }

    async fn change(&self, client: &Client, disk: &MemoryDisk, subject: Subject) {
        match subject {
            Subject::Given(dir) if pick(3) == 0 => {
                let begun = self.begin(subject, 0);
                let (cx, dir) = (client.cx(), self.dirs[dir]);
                let kind = match client.fs.remove(&cx, dir, name(GIVEN), RemoveKind::File).await {
                    Ok(()) => RegisterOp::Write(0),
                    Err(error) => RegisterOp::Read(absent(error)),
                };
                self.end(subject, begun, kind);
            }
            Subject::Given(dir) => self.give(client, dir).await,
            Subject::Links(number) => self.link(client, number).await,
            Subject::Moved(number) if number == client.number => {
                self.move_on(client, disk, number).await;
            }
            Subject::Moved(_) => self.look(client, subject).await,
        }
    }

    /// Gives the name to a new file, which is made in any directory.
    async fn give(&self, client: &Client, dir: usize) {
        let unique = client.requests.load(Ordering::Relaxed);
        let new = format!("new{}-{unique}", client.number);
        let above = self.dirs[pick(SERVERS as u64) as usize];
        let made = client.fs.create(&client.cx(), above, name(&new), NEW).await;
        let (entry, file) = made.unwrap();
        file.close(&client.cx()).await.unwrap();
        let subject = Subject::Given(dir);
        let begun = self.begin(subject, entry.id.ino);
        let (from, to) = ((above, name(&new)), (self.dirs[dir], name(GIVEN)));
        client.fs.rename(&client.cx(), from, to, RenameHow::Replace).await.unwrap();
        self.end(subject, begun, RegisterOp::Write(entry.id.ino));
    }

    /// Gives a file its second name, or takes it away.
    async fn link(&self, client: &Client, number: usize) {
        let subject = Subject::Links(number);
        let (cx, dir) = (client.cx(), self.dirs[(number + 1) % SERVERS]);
        let second = format!("second{number}");
        let links = pick(2) == 0;
        let begun = self.begin(subject, if links { 2 } else { 1 });
        let done = match links {
            true => client.fs.link(&cx, self.linked[number], dir, name(&second)).await.map(drop),
            false => client.fs.remove(&cx, dir, name(&second), RemoveKind::File).await,
        };
        let kind = match (links, done.map_err(|error| error.errno())) {
            (true, Ok(())) => RegisterOp::Write(2),
            (true, Err(Errno::EEXIST)) => RegisterOp::Read(2),
            (false, Ok(())) => RegisterOp::Write(1),
            (false, Err(Errno::ENOENT)) => RegisterOp::Read(1),
            (_, Err(error)) => panic!("link or unlink: {error:?}"),
        };
        self.end(subject, begun, kind);
    }

    async fn move_on(&self, client: &Client, disk: &MemoryDisk, number: usize) {
        let (from, to) = {
            let mut moves = self.moves.lock().unwrap();
            moves[number] += 1;
            way(moves[number] - 1)
        };
        let subject = Subject::Moved(number);
        // What it is set to is known behind it.
        let begun = self.begin(subject, u64::MAX);
        let text = format!("moved{number}");
        let (from, to) = ((self.dirs[from], name(&text)), (self.dirs[to], name(&text)));
        client.fs.rename(&client.cx(), from, to, RenameHow::NoReplace).await.unwrap();
        let id = self.moved[number];
        let attr = disk.mount().getattr(&Context::system(), id).await.unwrap();
        self.end(subject, begun, RegisterOp::Write(nanos(attr.ctime)));
    }

    /// A client that has died in the middle of its last move has not said what the move came to.
    pub async fn settle(&self, disk: &MemoryDisk) {
        for (number, id) in self.moved.iter().enumerate() {
            let attr = disk.mount().getattr(&Context::system(), *id).await.unwrap();
            for event in self.history(Subject::Moved(number)).iter_mut() {
                if event.kind == RegisterOp::Write(u64::MAX) {
                    event.kind = RegisterOp::Write(nanos(attr.ctime));
                }
            }
        }
    }

    pub async fn work(&self, client: &Client, disk: &MemoryDisk, may_change: bool) {
        for _ in 0..OPERATIONS {
            let subject = Subject::any();
            match pick(4) {
                0 if may_change => self.change(client, disk, subject).await,
                _ => self.look(client, subject).await,
            }
            match pick(4) {
                0 => sleep(Duration::from_micros(pick(self.pause.as_micros() as u64))).await,
                _ => sleep(Duration::from_micros(pick(3_000))).await,
            }
        }
    }
}

fn absent(error: dray_core::Error) -> u64 {
    assert_eq!(error.errno(), Errno::ENOENT, "{error:?}");
    0
}

/// The file of the name in a listing.
async fn listed(client: &Client, dir: FileId) -> u64 {
    let cx = client.cx();
    let attr = client.fs.getattr(&cx, dir).await.unwrap();
    assert_eq!(attr.file_type(), FileType::Directory);
    let open = client.fs.open(&cx, dir, OpenHow::DIRECTORY).await;
    let open = open.unwrap();
    let page = open.readdir(&cx, 0, 64 << 10, pick(2) == 0).await.unwrap();
    open.close(&cx).await.unwrap();
    let found = page.iter().find(|(found, _)| *found == GIVEN.as_bytes());
    found.map_or(0, |(_, entry)| entry.id.ino)
}
