//! Clients look up names and attributes that are leased to them, list a directory, and read extended
//! attributes. They change what is leased to others, and look at what they have changed. Some order must explain what all of them saw of each
//! name and each file: no answer is stale. Some clients are slow to give back what they are asked for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{
    Attr, Buf, CreateHow, Errno, FileId, FileSystem, Fut, Make, OpenHow, RemoveKind, RenameHow,
    SessionControl, SetAttr, TimeSet, Timestamp, Write, XattrSet,
};
use dray_rt::sleep;

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};
use crate::simulator::history::{
    EVENTS_MAX, HistoryEvent, RegisterOp, judge, linearizable, linearizable_from,
};
use crate::simulator::machine::LEASE_TERM;

/// Names that stand for one file or another, or for none.
const NAMES: [&str; 3] = ["first", "second", "listed"];
/// That one is looked for in listings alone.
const LISTED: usize = 2;
/// Files whose time of change is set.
const FILES: [&str; 2] = ["one", "other"];
/// A file that grows by writes. Its attributes come with the answers.
const GROWN: &str = "grown";
/// A directory that has one directory in it, or none. Each answer to a change brings its attributes.
const PARENT: &str = "parent";
const CHILD: &str = "child";
/// Operations of all clients together: as many as a history may have, if all are about one thing.
const OPERATIONS: u64 = EVENTS_MAX as u64;

/// An extended attribute that is set and removed. Listings say of which files it is absent.
const XATTR: &[u8] = b"security.capability";
const PAGE_BYTES: usize = 64 << 10;

/// What is changed and looked at. A name by its number, a file, or an attribute of a file. The size of the file
/// that grows, or how many directories there are in the parent.
#[derive(Clone, Copy)]
enum Subject {
    Name(usize),
    File(usize),
    Xattr(usize),
    Size,
    Children,
}

impl Subject {
    const COUNT: usize = Subject::Children.number() + 1;

    const fn number(self) -> usize {
        match self {
            Subject::Name(index) => index,
            Subject::File(index) => NAMES.len() + index,
            Subject::Xattr(index) => NAMES.len() + FILES.len() + index,
            Subject::Size => NAMES.len() + 2 * FILES.len(),
            Subject::Children => NAMES.len() + 2 * FILES.len() + 1,
        }
    }

    fn any() -> Subject {
        match pick(Subject::COUNT as u64) as usize {
            index if index < NAMES.len() => Subject::Name(index),
            index if index < NAMES.len() + FILES.len() => Subject::File(index - NAMES.len()),
            index if index < Subject::Size.number() => {
                Subject::Xattr(index - NAMES.len() - FILES.len())
            }
            index if index == Subject::Size.number() => Subject::Size,
            _ => Subject::Children,
        }
    }
}

pub(super) struct Leased {
    clients: u64,
    /// The files of [`FILES`], the one that grows, and the parent.
    files: Mutex<Vec<FileId>>,
    ticks: Mutex<u64>,
    /// By the numbers of the subjects.
    histories: [Mutex<Vec<HistoryEvent>>; Subject::COUNT],
}

impl Leased {
    pub(super) fn new(clients: usize) -> Leased {
        Leased {
            clients: clients as u64,
            files: Mutex::default(),
            ticks: Mutex::default(),
            histories: Default::default(),
        }
    }

    fn tick(&self) -> u64 {
        let mut ticks = lock(&self.ticks);
        *ticks += 1;
        *ticks
    }

    fn history(&self, subject: Subject) -> &Mutex<Vec<HistoryEvent>> {
        &self.histories[subject.number()]
    }

    /// Notes a change that is asked for; until it is answered it may happen or not.
    fn begin(&self, subject: Subject, value: u64) -> usize {
        let (from, kind) = (self.tick(), RegisterOp::Write(value));
        let mut events = lock(self.history(subject));
        events.push(HistoryEvent { from, to: u64::MAX, kind, optional: true });
        events.len() - 1
    }

    /// The event that [`begin`](Self::begin) made was answered, as `kind` says.
    fn end(&self, subject: Subject, index: usize, kind: RegisterOp) {
        let to = self.tick();
        let event = &mut lock(self.history(subject))[index];
        (event.to, event.kind, event.optional) = (to, kind, false);
    }

    async fn look(&self, client: &SimClient, subject: Subject) -> Outcome<()> {
        let from = self.tick();
        let found = match subject {
            Subject::Name(index) if index == LISTED || pick(4) == 0 => {
                find_in_listing(client, NAMES[index]).await?
            }
            Subject::Name(index) => match client.lookup(client.root(), NAMES[index]).await {
                Ok(entry) => entry.id.ino,
                Err(error) if error.errno() == Errno::ENOENT => 0,
                Err(error) => return Err(client.failed("look up")(error)),
            },
            Subject::File(index) => self.attributes(client, index).await?.mtime.sec as u64,
            Subject::Xattr(index) => {
                let id = lock(&self.files)[index];
                // Under the lease on these it is remembered.
                self.attributes(client, index).await?;
                match client.fs.getxattr(&client.cx(), id, XATTR).await {
                    Ok(value) => value.try_into().map_or(u64::MAX, u64::from_le_bytes),
                    Err(error) if error.errno() == Errno::ENODATA => 0,
                    Err(error) => return Err(client.failed("getxattr")(error)),
                }
            }
            Subject::Size => self.attributes(client, FILES.len()).await?.size,
            // A directory has its own name, its own ".", and the ".." of each one in it.
            Subject::Children => {
                u64::from(self.attributes(client, FILES.len() + 1).await?.nlink.saturating_sub(2))
            }
        };
        let (to, kind) = (self.tick(), RegisterOp::Read(found));
        lock(self.history(subject)).push(HistoryEvent { from, to, kind, optional: false });
        Ok(())
    }

    async fn attributes(&self, client: &SimClient, file: usize) -> Outcome<Attr> {
        let id = lock(&self.files)[file];
        client.fs.getattr(&client.cx(), id).await.map_err(client.failed("getattr"))
    }

    /// `unique`: no other change has this number.
    async fn change(&self, client: &SimClient, subject: Subject, unique: u64) -> Outcome<()> {
        match subject {
            Subject::Name(index) if pick(3) == 0 => self.remove(client, index).await,
            Subject::Name(index) => self.give(client, index, unique).await,
            Subject::File(index) => {
                let begun = self.begin(subject, unique);
                let mtime = Timestamp { sec: unique as i64, nsec: 0 };
                let set = SetAttr { mtime: Some(TimeSet::At(mtime)), ..SetAttr::default() };
                let id = lock(&self.files)[index];
                let changed = client.fs.setattr(&client.cx(), id, set).await;
                changed.map_err(client.failed("set the time"))?;
                self.end(subject, begun, RegisterOp::Write(unique));
                Ok(())
            }
            Subject::Xattr(index) if pick(2) == 0 => {
                let (begun, id) = (self.begin(subject, 0), lock(&self.files)[index]);
                let removed = client.fs.removexattr(&client.cx(), id, XATTR).await;
                let kind = match removed {
                    Ok(()) => RegisterOp::Write(0),
                    Err(error) if error.errno() == Errno::ENODATA => RegisterOp::Read(0),
                    Err(error) => return Err(client.failed("removexattr")(error)),
                };
                self.end(subject, begun, kind);
                Ok(())
            }
            Subject::Xattr(index) => {
                let begun = self.begin(subject, unique);
                let (id, value) = (lock(&self.files)[index], unique.to_le_bytes());
                let set = client.fs.setxattr(&client.cx(), id, XATTR, &value, XattrSet::Any).await;
                set.map_err(client.failed("setxattr"))?;
                self.end(subject, begun, RegisterOp::Write(unique));
                Ok(())
            }
            Subject::Size => self.grow(client, unique).await,
            Subject::Children => self.change_children(client).await,
        }
    }

    /// Writes the last byte of a file that has `size` bytes then, if it has no more.
    async fn grow(&self, client: &SimClient, size: u64) -> Outcome<()> {
        let (cx, id) = (client.cx(), lock(&self.files)[FILES.len()]);
        let file = client.fs.open(&cx, id, OpenHow::READ_WRITE).await;
        let file = file.map_err(client.failed("open"))?;
        let begun = self.begin(Subject::Size, size);
        let written = file.write(&client.cx(), Write::at(size - 1), Buf::from(&b"x"[..])).await;
        written.map_err(client.failed("write"))?;
        self.end(Subject::Size, begun, RegisterOp::Write(size));
        file.close(&client.cx()).await.map_err(client.failed("close"))
    }

    /// Makes the directory in the parent, or removes it. If that cannot be, one was there, or none.
    async fn change_children(&self, client: &SimClient) -> Outcome<()> {
        let (cx, parent) = (client.cx(), lock(&self.files)[FILES.len() + 1]);
        let (child, there) = (name(CHILD), u64::from(pick(2) == 0));
        let begun = self.begin(Subject::Children, there);
        let changed = match there {
            0 => client.fs.remove(&cx, parent, &child, RemoveKind::Directory).await,
            _ => {
                let how = Make::Directory { mode: 0o755 };
                client.fs.make(&cx, parent, &child, how).await.map(|_| ())
            }
        };
        let kind = match changed {
            Ok(()) => RegisterOp::Write(there),
            Err(error) if matches!(error.errno(), Errno::EEXIST | Errno::ENOENT) => {
                RegisterOp::Read(there)
            }
            Err(error) => return Err(client.failed("change the parent")(error)),
        };
        self.end(Subject::Children, begun, kind);
        Ok(())
    }

    /// Gives the name to a new file.
    async fn give(&self, client: &SimClient, index: usize, unique: u64) -> Outcome<()> {
        let new = format!("new{unique}");
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
        let made = client.fs.create(&client.cx(), client.root(), &name(&new), how).await;
        let (entry, open) = made.map_err(client.failed("create"))?;
        open.close(&client.cx()).await.map_err(client.failed("close"))?;
        let subject = Subject::Name(index);
        let begun = self.begin(subject, entry.id.ino);
        let (from, to) = (name(&new), name(NAMES[index]));
        let (from, to) = ((client.root(), &*from), (client.root(), &*to));
        let renamed = client.fs.rename(&client.cx(), from, to, RenameHow::Replace).await;
        renamed.map_err(client.failed("rename"))?;
        self.end(subject, begun, RegisterOp::Write(entry.id.ino));
        Ok(())
    }

    async fn remove(&self, client: &SimClient, index: usize) -> Outcome<()> {
        let subject = Subject::Name(index);
        let begun = self.begin(subject, 0);
        let (cx, named) = (client.cx(), name(NAMES[index]));
        let removed = client.fs.remove(&cx, client.root(), &named, RemoveKind::File).await;
        let kind = match removed {
            Ok(()) => RegisterOp::Write(0),
            Err(error) if error.errno() == Errno::ENOENT => RegisterOp::Read(0),
            Err(error) => return Err(client.failed("remove")(error)),
        };
        self.end(subject, begun, kind);
        Ok(())
    }

    /// What is asked back is given back at once, or late, or never.
    fn hear_recalls(client: &SimClient) {
        client.fs.hear_recalls_by(Arc::new(|_, done| {
            let late = match pick(32) {
                0 => LEASE_TERM * 3,
                1..8 => Duration::from_micros(pick(50_000)),
                _ => return drop(done),
            };
            dray_rt::spawn(async move {
                sleep(late).await;
                drop(done);
            });
        }));
    }
}

/// The file of that name in the root, by a listing of it; 0: there is none.
async fn find_in_listing(client: &SimClient, text: &str) -> Outcome<u64> {
    let cx = client.cx();
    // Under the lease on these it is remembered.
    let attr = client.fs.getattr(&cx, client.root()).await;
    attr.map_err(client.failed("getattr"))?;
    let how = OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY);
    let dir = client.fs.open(&cx, client.root(), how).await;
    let dir = dir.map_err(client.failed("open the directory"))?;
    let page = dir.readdir(&cx, 0, PAGE_BYTES, pick(2) == 0).await;
    let page = page.map_err(client.failed("list"))?;
    dir.close(&cx).await.map_err(client.failed("close"))?;
    let found = page.iter().find(|(name, _)| *name == text.as_bytes());
    Ok(found.map_or(0, |(_, entry)| entry.id.ino))
}

/// Mostly not for long; at times until leases have ended, or what was fought over is leased again.
async fn pause() {
    match pick(4) {
        0 => sleep(Duration::from_micros(pick(2 * LEASE_TERM.as_micros() as u64))).await,
        _ => think().await,
    }
}

impl Workload for Leased {
    fn name(&self) -> &'static str {
        "leased"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for text in FILES {
                let file = client.open(client.root(), text, libc::O_RDWR).await?;
                let time = Some(TimeSet::At(Timestamp { sec: 0, nsec: 0 }));
                let set = SetAttr { mtime: time, ..SetAttr::default() };
                let set = file.setattr(&client.cx(), set).await;
                set.map_err(client.failed("set the time"))?;
                lock(&self.files).push(file.id());
                file.close(&client.cx()).await.map_err(client.failed("close"))?;
            }
            let file = client.open(client.root(), GROWN, libc::O_RDWR).await?;
            lock(&self.files).push(file.id());
            file.close(&client.cx()).await.map_err(client.failed("close"))?;
            let (cx, how) = (client.cx(), Make::Directory { mode: 0o755 });
            let parent = client.fs.make(&cx, client.root(), &name(PARENT), how).await;
            let parent = parent.map_err(client.failed("make the parent"))?;
            lock(&self.files).push(parent.id);
            Ok(())
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            Leased::hear_recalls(client);
            for number in 0..OPERATIONS / self.clients {
                let subject = Subject::any();
                match pick(5) {
                    0 => {
                        let unique = (client.number as u64 + 1) << 16 | number;
                        self.change(client, subject, unique).await?;
                    }
                    _ => self.look(client, subject).await?,
                }
                pause().await;
            }
            Ok(())
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for (subject, events) in self.histories.iter().enumerate() {
                let events = lock(events);
                let explained = match subject == Subject::Size.number() {
                    true => linearizable_from(0, &events, |size, kind| match *kind {
                        RegisterOp::Read(found) => (found == *size).then_some(*size),
                        RegisterOp::Write(end) => Some(end.max(*size)),
                    }),
                    false => linearizable(&events),
                };
                judge(explained, &*events)?;
            }
            Ok(())
        })
    }
}
