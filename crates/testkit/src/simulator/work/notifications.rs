//! What a server tells its clients and asks them of its own accord. Several clients have files open
//! and change them. In calm each that has one open, and caches, is notified soon after another has
//! changed it, and nobody else is. And the server is looked at, and asks clients for the jobs of
//! their callers: one that does not answer holds up nobody.

mod disruption;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{
    Allocate, Buf, CreateHow, Error, FileId, FileSystem, Fut, OpenHow, RemoveKind, SessionControl,
    SetAttr, Write, XattrSet,
};
use dray_rt::sleep;

use super::{Workload, lock, pick, think};
use crate::simulator::client::{SimClient, SimFile, name};
use crate::simulator::{Outcome, World};

/// Files that all use.
const FILES: usize = 3;
/// Steps of each client while everything goes wrong.
const STEPS: u64 = 12;
/// Rounds in calm, after all is healed and after each disruption.
const ROUNDS: u64 = 6;
/// Longest that it takes in calm until a client is notified of a change: ten times as long as
/// changes are coalesced.
const NOTIFY_MAX: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Notifications(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    ids: Vec<FileId>,
    /// By client: which files it has open.
    open: BTreeMap<usize, Vec<(usize, SimFile)>>,
    /// By client and file: how often it was notified since that was last looked at.
    notified: BTreeMap<(usize, FileId), u64>,
    /// By client and file: changes that were asked for since then.
    asked: BTreeMap<(usize, FileId), u64>,
    /// Files that each client has asked to have open at some time.
    ever: BTreeSet<(usize, FileId)>,
}

impl State {
    /// The clients that have `file` open and are notified when `changer` changes it.
    fn watchers(&self, changer: usize, file: usize) -> Vec<(usize, FileId)> {
        let has = |files: &[(usize, SimFile)]| files.iter().any(|(of, _)| *of == file);
        let others = self.open.iter().filter(|(client, files)| **client != changer && has(files));
        others.map(|(client, _)| (*client, self.ids[file])).collect()
    }

    /// How often others than `client` have asked to change `file`.
    fn asked_by_others(&self, client: usize, file: FileId) -> u64 {
        let others = self.asked.iter().filter(|((by, of), _)| *by != client && *of == file);
        others.map(|(_, count)| count).sum()
    }
}

fn called(file: usize) -> String {
    format!("seen{file}")
}

/// The job of the callers on a node.
pub(in crate::simulator) fn job_on(host: &str) -> Box<str> {
    format!("job on {host}").into()
}

impl Notifications {
    fn id(&self, file: usize) -> FileId {
        lock(&self.0).ids[file]
    }

    /// Notes notifications of the client, and answers what it is asked, or not.
    fn listen(&self, client: &SimClient) {
        let (state, number) = (self.0.clone(), client.number);
        let host = format!("client{number}");
        client.fs.hear_changes_by(Box::new(move |files| {
            let mut state = lock(&state);
            files
                .into_iter()
                .for_each(|file| *state.notified.entry((number, file)).or_default() += 1);
        }));
        client.fs.find_jobs_by(Box::new(move |callers, answer| {
            let jobs = callers.into_iter().map(|caller| (caller, job_on(&host))).collect();
            match pick(3) {
                0 => drop(answer), // it never answers
                1 => answer(jobs),
                _ => dray_rt::spawn(async move {
                    sleep(Duration::from_millis(pick(1500))).await;
                    answer(jobs);
                }),
            }
        }));
    }

    async fn open(&self, client: &SimClient, file: usize) -> Outcome<()> {
        let id = self.id(file);
        lock(&self.0).ever.insert((client.number, id));
        let opened = client.fs.open(&client.cx(), id, OpenHow::READ_WRITE).await;
        let opened = opened.map_err(client.failed("open"))?;
        lock(&self.0).open.entry(client.number).or_default().push((file, opened));
        Ok(())
    }

    /// Closes one of the client's files, if it has any.
    async fn close(&self, client: &SimClient) -> Outcome<bool> {
        let one = lock(&self.0).open.get_mut(&client.number).and_then(|files| {
            let at = pick(files.len().max(1) as u64) as usize;
            (at < files.len()).then(|| files.swap_remove(at))
        });
        let Some((_, file)) = one else { return Ok(false) };
        file.close(&client.cx()).await.map_err(client.failed("close"))?;
        Ok(true)
    }

    /// Changes a file by one of all the ways there are.
    async fn change(&self, client: &SimClient, file: usize) -> Outcome<()> {
        let id = self.id(file);
        let way = pick(WAYS);
        {
            let mut state = lock(&self.0);
            *state.asked.entry((client.number, id)).or_default() += CHANGES[way as usize];
            state.ever.insert((client.number, id)); // some ways open it for a moment
        }
        let changed = change(client, (file, id), way).await;
        changed.map_err(client.failed(&format!("change {} the way {way}", called(file))))
    }

    /// Each client may have been notified of changes of files that it had open, no more.
    fn nothing_for_nothing(&self, again: u64) -> Outcome<()> {
        let state = lock(&self.0);
        for ((client, file), &notified) in &state.notified {
            let most = state.asked_by_others(*client, *file) + again;
            if !state.ever.contains(&(*client, *file)) || notified > most {
                return Err(format!(
                    "client {client} was notified {notified} times of {file}, which others changed at \
                     most {most} times"
                ));
            }
        }
        Ok(())
    }

    fn forget(&self) {
        let mut state = lock(&self.0);
        state.notified.clear();
        state.asked.clear();
    }

    /// One to three changes; then each client that must have been notified was, and no other one.
    async fn round(&self, clients: &[SimClient]) -> Outcome<()> {
        self.forget();
        let (mut wanted, mut changers) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..1 + pick(3) {
            let (by, file) = (pick(clients.len() as u64) as usize, pick(FILES as u64) as usize);
            wanted.extend(lock(&self.0).watchers(clients[by].number, file));
            changers.insert((clients[by].number, self.id(file)));
            self.change(&clients[by], file).await?;
            if pick(2) == 0 {
                think().await;
            }
        }
        sleep(NOTIFY_MAX).await;
        let notified: BTreeSet<_> = lock(&self.0).notified.keys().copied().collect();
        if let Some((client, file)) = wanted.difference(&notified).next() {
            return Err(format!(
                "client {client} was not notified that another client changed {file}"
            ));
        }
        // Who has opened it to change it may have it open still when the next one does.
        let may = &wanted | &changers;
        if let Some((client, file)) = notified.difference(&may).next() {
            return Err(format!("client {client} was notified of {file} without a change"));
        }
        self.nothing_for_nothing(0)
    }

    async fn calm(&self, clients: &[SimClient]) -> Outcome<()> {
        sleep(NOTIFY_MAX).await;
        for _ in 0..ROUNDS {
            let client = &clients[pick(clients.len() as u64) as usize];
            match pick(4) {
                0 => self.open(client, pick(FILES as u64) as usize).await?,
                1 => _ = self.close(client).await?,
                _ => {}
            }
            sleep(NOTIFY_MAX).await; // a close is not waited for
            self.round(clients).await?;
        }
        Ok(())
    }
}

/// How many changes each of the ways is.
const CHANGES: [u64; WAYS as usize] = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2];
/// Ways to change a file.
const WAYS: u64 = 11;

async fn change(client: &SimClient, (file, id): (usize, FileId), way: u64) -> Result<(), Error> {
    let (cx, fs, root) = (client.cx(), &client.fs, client.root());
    let (named, further) = (name(&called(file)), name(&format!("of{}", client.number)));
    let bytes = || Buf::from(&[client.number as u8; 100][..]);
    let set = SetAttr::default();
    match way {
        0 => _ = fs.setattr(&cx, id, SetAttr { size: Some(pick(200)), ..set }).await?,
        1 => _ = fs.setattr(&cx, id, SetAttr { mode: Some(0o644), ..set }).await?,
        2 => fs.setxattr(&cx, id, b"user.seen", b"x", XattrSet::Any).await?,
        3 => {
            fs.link(&cx, id, root, &further).await?;
            fs.remove(&client.cx(), root, &further, RemoveKind::File).await?;
        }
        4 => fs.put(&cx, root, &named, 0o644, bytes()).await?,
        5 => {
            let open = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
            let how = CreateHow { open, mode: 0o644, exclusive: false };
            fs.create(&cx, root, &named, how).await?.1.close(&client.cx()).await?;
        }
        6 => {
            let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
            fs.open(&cx, id, how).await?.close(&client.cx()).await?;
        }
        _ => {
            let open = fs.open(&cx, id, OpenHow::READ_WRITE).await?;
            change_open(client, &*open, way, bytes()).await?;
            open.close(&client.cx()).await?;
        }
    }
    Ok(())
}

async fn change_open(
    client: &SimClient,
    file: &dyn dray_core::OpenFile,
    way: u64,
    bytes: Buf,
) -> Result<(), Error> {
    let cx = client.cx();
    match way {
        7 => _ = file.write(&cx, Write::at(pick(100)), bytes).await?,
        8 => {
            let how = Write { append: true, ..Write::default() };
            file.write(&cx, how, bytes).await?;
        }
        9 => {
            let what = Allocate { flags: 0, at: pick(100), len_bytes: 100 };
            file.allocate(&cx, what).await?;
        }
        _ => {
            // Within the file, which has bytes by then.
            file.write(&cx, Write::at(0), bytes).await?;
            file.copy_range(&client.cx(), 0, file, 1000, 50).await?;
        }
    }
    Ok(())
}

impl Workload for Notifications {
    fn name(&self) -> &'static str {
        "notified"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for file in 0..FILES {
                let opened = client.open(client.root(), &called(file), libc::O_RDWR).await?;
                lock(&self.0).ids.push(opened.id());
                lock(&self.0).ever.insert((client.number, opened.id()));
                opened.close(&client.cx()).await.map_err(client.failed("close"))?;
            }
            Ok(())
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            self.listen(client);
            // Whatever comes next: others change it meanwhile.
            self.open(client, client.number % FILES).await?;
            for _ in 0..STEPS {
                let file = pick(FILES as u64) as usize;
                match pick(4) {
                    0 => self.open(client, file).await?,
                    1 => _ = self.close(client).await?,
                    _ => self.change(client, file).await?,
                }
                think().await;
            }
            Ok(())
        })
    }

    fn crashed(&self, number: usize) {
        lock(&self.0).open.remove(&number);
    }

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }

    fn settled<'a>(&'a self, world: &'a mut World) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            // A change that a death cut short is made, and reported, once more.
            self.nothing_for_nothing(world.machine.deaths())?;
            // A connection may have been on its way when all was healed.
            self.everybody_is_back(world).await?;
            self.calm(&world.clients).await?;
            for _ in 0..2 {
                self.disruption(world).await?;
                self.calm(&world.clients).await?;
            }
            if world.clients.len() > 1 && pick(3) == 0 {
                self.evict_one(world).await?;
                self.calm(&world.clients).await?;
            }
            for client in &world.clients {
                while self.close(client).await? {}
            }
            self.calm_without_files(&world.clients).await
        })
    }
}
