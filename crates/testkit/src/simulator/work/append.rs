//! Several clients append records to one log: each acknowledged record is there once,
//! whole, and no record is there twice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use dray_core::{Buf, BufMut, Fut, Write};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::SimClient;

/// Records of each client.
const RECORDS: u64 = 25;
/// Longest filling of a record, bytes: a few chunks of the disk.
const FILLING_BYTES: u64 = 9000;

#[derive(Default)]
pub(super) struct Append {
    acknowledged: Mutex<BTreeSet<String>>,
}

impl Workload for Append {
    fn name(&self) -> &'static str {
        "append"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let flags = libc::O_RDWR | libc::O_APPEND;
            let mut file = client.open(client.root(), "log", flags).await?;
            for number in 0..RECORDS {
                let filling = if pick(3) == 0 { pick(FILLING_BYTES) } else { pick(20) };
                let id = format!("{}-{number}-{filling}", client.number);
                let record = format!("<{id} {}>", "x".repeat(filling as usize));
                let how = Write { append: true, ..Write::default() };
                let written = file.write(&client.cx(), how, Buf::from(record.as_bytes())).await;
                let written = written.map_err(client.failed(&format!("append {id}")))?;
                if written != record.len() {
                    return Err(format!("{written} bytes of record {id} were written"));
                }
                lock(&self.acknowledged).insert(id);
                if pick(6) == 0 {
                    file.close(&client.cx()).await.map_err(client.failed("close"))?;
                    file = client.open(client.root(), "log", flags).await?;
                }
                think().await;
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let text = whole_file(client, "log").await?;
            let mut found = BTreeMap::<&str, usize>::new();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let (record, behind) = parse(rest).ok_or_else(|| {
                    let at = text.len() - rest.len();
                    format!("at {at} of the log there is no whole record")
                })?;
                *found.entry(record).or_default() += 1;
                rest = behind;
            }
            if let Some((id, count)) = found.iter().find(|(_, count)| **count > 1) {
                return Err(format!("record {id} is there {count} times"));
            }
            let acknowledged = lock(&self.acknowledged);
            match acknowledged.iter().find(|id| !found.contains_key(id.as_str())) {
                Some(id) => Err(format!("record {id} was acknowledged and is lost")),
                None => Ok(()),
            }
        })
    }
}

/// Takes a record off, answering its id and the rest.
fn parse(text: &str) -> Option<(&str, &str)> {
    let (id, rest) = text.strip_prefix('<')?.split_once(' ')?;
    let filling: usize = id.rsplit_once('-')?.1.parse().ok()?;
    let (body, rest) = rest.split_at_checked(filling)?;
    let rest = rest.strip_prefix('>')?;
    body.bytes().all(|byte| byte == b'x').then_some((id, rest))
}

async fn whole_file(client: &SimClient, name: &str) -> Outcome<String> {
    let file = client.open(client.root(), name, libc::O_RDONLY).await?;
    let mut text = Vec::new();
    loop {
        let read = file.read(&client.cx(), text.len() as u64, BufMut::heap(1 << 20)).await;
        let read = read.map_err(|(error, _)| client.failed("read the log")(error))?;
        if read.is_empty() {
            break;
        }
        text.extend_from_slice(read.filled());
    }
    file.close(&client.cx()).await.map_err(client.failed("close"))?;
    String::from_utf8(text).map_err(|_| "the log is not text".into())
}
