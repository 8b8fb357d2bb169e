//! Several clients pass tokens around by changes of names, of which each must happen once:
//! mkdir, rename, link, unlink, rmdir, exclusive create.

use std::collections::BTreeMap;
use std::sync::Mutex;

use dray_core::{
    CreateHow, Errno, Error, FileId, FileSystem, Fut, Make, OpenHow, RemoveKind, RenameHow,
};

use super::{Work, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{Client, name};

/// Rounds of each client.
const ROUNDS: u64 = 20;
const TOKENS: u64 = 3;

pub(super) struct Names {
    clients: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Who has taken a token or made a name, as far as anybody was told.
    owners: BTreeMap<String, usize>,
    crashed: bool,
}

/// The two ways to claim a name.
#[derive(Clone, Copy, PartialEq)]
enum Claim {
    Directory,
    File,
}

impl Names {
    pub(super) fn new(clients: usize) -> Names {
        Names { clients, state: Mutex::default() }
    }

    fn owner(&self, what: &str) -> Option<usize> {
        lock(&self.state).owners.get(what).copied()
    }

    /// Somebody was told that it is theirs.
    fn taken(&self, what: &str, client: &Client) -> Outcome<()> {
        match lock(&self.state).owners.insert(what.to_owned(), client.number) {
            None => Ok(()),
            Some(other) => Err(format!("{other} and {} both have {what}", client.number)),
        }
    }

    /// It is about to be given back: somebody else may have it before we are told.
    fn given(&self, what: &str) {
        lock(&self.state).owners.remove(what);
    }

    async fn pass_token(&self, client: &Client, dirs: [FileId; 2]) -> Outcome<()> {
        let token = format!("token{}", pick(TOKENS));
        let [pool, mine] = dirs.map(|dir| (dir, name(&token)));
        let (pool, mine) = ((pool.0, &*pool.1), (mine.0, &*mine.1));
        let (cx, how) = (client.cx(), RenameHow::NoReplace);
        if self.owner(&token) == Some(client.number) {
            if pick(2) == 0 {
                return self.link(client, mine.0, &token).await;
            }
            self.given(&token);
            let back = client.fs.rename(&cx, mine, pool, how).await;
            return back.map_err(client.failed(&format!("give {token} back")));
        }
        match client.fs.rename(&cx, pool, mine, how).await {
            Ok(()) => self.taken(&token, client),
            Err(error) => allow(error, Errno::ENOENT, &client.failed(&format!("take {token}"))),
        }
    }

    /// A further name of a token of one's own, for a while.
    async fn link(&self, client: &Client, mine: FileId, token: &str) -> Outcome<()> {
        let found = client.lookup(mine, token).await.map_err(client.failed("find a token"))?;
        let further = name("further");
        let linked = client.fs.link(&client.cx(), found.id, mine, &further).await;
        let linked = linked.map_err(client.failed("link"))?;
        if linked.attr.nlink != 2 {
            return Err(format!("{token} has {} names, not 2", linked.attr.nlink));
        }
        let removed = client.fs.remove(&client.cx(), mine, &further, RemoveKind::File).await;
        removed.map_err(client.failed("unlink a further name"))
    }

    async fn claim(&self, client: &Client, what: Claim) -> Outcome<()> {
        let text = format!("{}{}", if what == Claim::File { "file" } else { "dir" }, pick(2));
        let (cx, root, named) = (client.cx(), client.root(), name(&text));
        if self.owner(&text) == Some(client.number) {
            let kind = match what {
                Claim::File => RemoveKind::File,
                Claim::Directory => RemoveKind::Directory,
            };
            self.given(&text);
            let removed = client.fs.remove(&cx, root, &named, kind).await;
            return removed.map_err(client.failed(&format!("remove {text}")));
        }
        let made = match what {
            Claim::Directory => {
                client.fs.make(&cx, root, &named, Make::Directory { mode: 0o755 }).await.map(drop)
            }
            Claim::File => {
                let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
                match client.fs.create(&cx, root, &named, how).await {
                    Ok((_, file)) => file.close(&client.cx()).await,
                    Err(error) => Err(error),
                }
            }
        };
        match made {
            Ok(()) => self.taken(&text, client),
            Err(error) => allow(error, Errno::EEXIST, &client.failed(&format!("make {text}"))),
        }
    }
}

fn allow(error: Error, errno: Errno, failed: &impl Fn(Error) -> String) -> Outcome<()> {
    if error.errno() == errno { Ok(()) } else { Err(failed(error)) }
}

async fn dir(client: &Client, text: &str) -> Outcome<FileId> {
    let found = client.lookup(client.root(), text).await;
    Ok(found.map_err(client.failed("find a directory"))?.id)
}

impl Work for Names {
    fn name(&self) -> &'static str {
        "names"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let mut dirs = vec!["pool".to_owned()];
            dirs.extend((0..self.clients).map(|number| format!("of{number}")));
            for text in dirs {
                let what = Make::Directory { mode: 0o777 };
                let made = client.fs.make(&client.cx(), client.root(), &name(&text), what).await;
                made.map_err(client.failed("prepare"))?;
            }
            let pool = dir(client, "pool").await?;
            for number in 0..TOKENS {
                let file = client.open(pool, &format!("token{number}"), libc::O_RDWR).await?;
                file.close(&client.cx()).await.map_err(client.failed("close"))?;
            }
            Ok(())
        })
    }

    fn run<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let pool = dir(client, "pool").await?;
            let mine = dir(client, &format!("of{}", client.number)).await?;
            for _ in 0..ROUNDS {
                match pick(4) {
                    0 => self.claim(client, Claim::Directory).await?,
                    1 => self.claim(client, Claim::File).await?,
                    _ => self.pass_token(client, [pool, mine]).await?,
                }
                think().await;
            }
            Ok(())
        })
    }

    fn crashed(&self, number: usize) {
        let mut state = lock(&self.state);
        state.crashed = true;
        state.owners.retain(|_, owner| *owner != number);
    }

    fn verify<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let crashed = lock(&self.state).crashed;
            for number in 0..TOKENS {
                let token = format!("token{number}");
                let mut places = Vec::new();
                let holders = (0..self.clients).map(Some).chain([None]);
                for holder in holders {
                    let text = holder.map_or("pool".into(), |number| format!("of{number}"));
                    let dir = dir(client, &text).await?;
                    if client.lookup(dir, &token).await.is_ok() {
                        places.push(holder);
                    }
                }
                let owner = self.owner(&token);
                if places.len() != 1 || !crashed && places[0] != owner {
                    return Err(format!("{token} belongs to {owner:?} and is with {places:?}"));
                }
            }
            for text in ["file0", "file1", "dir0", "dir1"] {
                let there = client.lookup(client.root(), text).await.is_ok();
                let owner = self.owner(text);
                if there != owner.is_some() && !(crashed && owner.is_none()) {
                    return Err(format!("{text} belongs to {owner:?}; is it there? {there}"));
                }
            }
            Ok(())
        })
    }
}
