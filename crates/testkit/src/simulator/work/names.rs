//! Several clients pass tokens around by changes of names, of which each must happen once. They are
//! mkdir, rename, link, unlink, rmdir, exclusive create, a name for a file that had none, and
//! extended attributes that must not be there.

use std::collections::BTreeMap;
use std::sync::Mutex;

use dray_core::{
    Buf, BufMut, CreateHow, Errno, Error, FileId, FileSystem, Fut, Make, OpenHow, RemoveKind,
    RenameHow, Write, XattrSet,
};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};

/// Rounds of each client.
const ROUNDS: u64 = 24;
const TOKENS: u64 = 3;

pub(super) struct Names {
    clients: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Who has taken a token or made a name, as far as anybody got an answer.
    owners: BTreeMap<String, usize>,
    crashed: bool,
}

/// The ways to claim something that one alone can have.
#[derive(Clone, Copy)]
enum Claim {
    Directory,
    File,
    /// A file without a name is made, written, and given the name.
    Unnamed,
    /// An attribute of a file that all share.
    Attribute,
}

impl Claim {
    fn drawn() -> Claim {
        [Claim::Directory, Claim::File, Claim::Unnamed, Claim::Attribute][pick(4) as usize]
    }

    /// The names in question begin so.
    fn prefix(self) -> &'static str {
        match self {
            Claim::Directory => "dir",
            Claim::File => "file",
            Claim::Unnamed => "unnamed",
            Claim::Attribute => "user.",
        }
    }
}

/// What a file holds that had no name at first.
fn mark(client: usize) -> [u8; 1] {
    [client as u8 + 1]
}

impl Names {
    pub(super) fn new(clients: usize) -> Names {
        Names { clients, state: Mutex::default() }
    }

    fn owner(&self, what: &str) -> Option<usize> {
        lock(&self.state).owners.get(what).copied()
    }

    /// A client got the answer that it has the name or token.
    fn taken(&self, what: &str, client: &SimClient) -> Outcome<()> {
        match lock(&self.state).owners.insert(what.to_owned(), client.number) {
            None => Ok(()),
            Some(other) => Err(format!("{other} and {} both have {what}", client.number)),
        }
    }

    /// The client is about to give `what` back: another client may have it before the answer is here.
    fn given(&self, what: &str) {
        lock(&self.state).owners.remove(what);
    }

    async fn pass_token(&self, client: &SimClient, dirs: [FileId; 2]) -> Outcome<()> {
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
    async fn link(&self, client: &SimClient, mine: FileId, token: &str) -> Outcome<()> {
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

    async fn claim(&self, client: &SimClient) -> Outcome<()> {
        let what = Claim::drawn();
        let text = format!("{}{}", what.prefix(), pick(2));
        if self.owner(&text) == Some(client.number) {
            self.given(&text);
            let given = give_back(client, what, &text).await;
            return given.map_err(client.failed(&format!("remove {text}")));
        }
        match take(client, what, &text).await {
            Ok(()) => self.taken(&text, client),
            Err(error) => allow(error, Errno::EEXIST, &client.failed(&format!("make {text}"))),
        }
    }
}

/// Makes what nobody else may have made.
async fn take(client: &SimClient, what: Claim, text: &str) -> Result<(), Error> {
    let (cx, root, named) = (client.cx(), client.root(), name(text));
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
    match what {
        Claim::Directory => {
            client.fs.make(&cx, root, &named, Make::Directory { mode: 0o755 }).await.map(drop)
        }
        Claim::File => {
            let (_, file) = client.fs.create(&cx, root, &named, how).await?;
            file.close(&client.cx()).await
        }
        Claim::Unnamed => {
            let how = CreateHow { exclusive: false, ..how }; // else it could get no name
            let (entry, file) = client.fs.tmpfile(&cx, root, how).await?;
            let bytes = Buf::from(&mark(client.number)[..]);
            file.write(&client.cx(), Write::at(0), bytes).await?;
            let linked = client.fs.link(&client.cx(), entry.id, root, &named).await;
            file.close(&client.cx()).await?;
            linked.map(drop)
        }
        Claim::Attribute => {
            let id = client.lookup(root, "shared").await?.id;
            let value = mark(client.number);
            client.fs.setxattr(&cx, id, text.as_bytes(), &value, XattrSet::Create).await
        }
    }
}

async fn give_back(client: &SimClient, what: Claim, text: &str) -> Result<(), Error> {
    let (cx, root, named) = (client.cx(), client.root(), name(text));
    let kind = match what {
        Claim::File | Claim::Unnamed => RemoveKind::File,
        Claim::Directory => RemoveKind::Directory,
        Claim::Attribute => {
            let id = client.lookup(root, "shared").await?.id;
            return client.fs.removexattr(&cx, id, text.as_bytes()).await;
        }
    };
    client.fs.remove(&cx, root, &named, kind).await
}

/// Who has made what is there: none if nothing is, `Err` if its content does not say so.
async fn maker(client: &SimClient, what: Claim, text: &str) -> Option<Result<Vec<u8>, ()>> {
    let cx = client.cx();
    if let Claim::Attribute = what {
        let id = client.lookup(client.root(), "shared").await.ok()?.id;
        return client.fs.getxattr(&cx, id, text.as_bytes()).await.ok().map(Ok);
    }
    let found = client.lookup(client.root(), text).await.ok()?;
    let Claim::Unnamed = what else { return Some(Err(())) };
    let file = client.fs.open(&cx, found.id, OpenHow::READ).await.ok()?;
    let read = file.read(&client.cx(), 0, BufMut::heap(8)).await.ok()?;
    file.close(&client.cx()).await.ok()?;
    Some(Ok(read.filled().to_vec()))
}

fn allow(error: Error, errno: Errno, failed: &impl Fn(Error) -> String) -> Outcome<()> {
    if error.errno() == errno { Ok(()) } else { Err(failed(error)) }
}

async fn dir(client: &SimClient, text: &str) -> Outcome<FileId> {
    let found = client.lookup(client.root(), text).await;
    Ok(found.map_err(client.failed("find a directory"))?.id)
}

impl Workload for Names {
    fn name(&self) -> &'static str {
        "names"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let mut dirs = vec!["pool".to_owned()];
            dirs.extend((0..self.clients).map(|number| format!("of{number}")));
            for text in dirs {
                let what = Make::Directory { mode: 0o777 };
                let made = client.fs.make(&client.cx(), client.root(), &name(&text), what).await;
                made.map_err(client.failed("prepare"))?;
            }
            let shared = client.open(client.root(), "shared", libc::O_RDWR).await?;
            shared.close(&client.cx()).await.map_err(client.failed("close"))?;
            let pool = dir(client, "pool").await?;
            for number in 0..TOKENS {
                let file = client.open(pool, &format!("token{number}"), libc::O_RDWR).await?;
                file.close(&client.cx()).await.map_err(client.failed("close"))?;
            }
            Ok(())
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let pool = dir(client, "pool").await?;
            let mine = dir(client, &format!("of{}", client.number)).await?;
            for _ in 0..ROUNDS {
                match pick(2) {
                    0 => self.claim(client).await?,
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

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
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
            for what in [Claim::Directory, Claim::File, Claim::Unnamed, Claim::Attribute] {
                for number in 0..2 {
                    let text = format!("{}{number}", what.prefix());
                    let (owner, found) = (self.owner(&text), maker(client, what, &text).await);
                    if found.is_some() != owner.is_some() && !(crashed && owner.is_none()) {
                        let there = found.is_some();
                        return Err(format!("{text} belongs to {owner:?}; is it there? {there}"));
                    }
                    if let (Some(Ok(found)), Some(owner)) = (found, owner)
                        && found != mark(owner)
                    {
                        return Err(format!("{text} belongs to {owner} and holds {found:?}"));
                    }
                }
            }
            Ok(())
        })
    }
}
