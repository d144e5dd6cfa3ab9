//! A worker as a GPU manager reports it in JSON: a list of devices with vendor, name and memory.

use std::collections::BTreeMap;

use infercluster_spec::Bytes;

use super::error::ImportError;
use super::facts::NodeFacts;
use super::text::Text;
use super::tree::{Document, Node};
use super::{Import, Kind};

/// Keys under which managers list devices.
const LISTS: [&str; 4] = ["gpu_devices", "gpus", "devices", "accelerators"];
/// Devices of one worker.
const GPUS_LIMIT: usize = 256;
/// Workers of one file.
const WORKERS_LIMIT: usize = 65_536;

pub(super) fn read(document: &Document, text: &Text) -> Result<Option<Import>, ImportError> {
    let mut workers = Vec::new();
    for root in &document.roots {
        let items = root.list().or_else(|| root.get("items").and_then(Node::list));
        match items {
            Some(items) => workers.extend(items.iter().filter_map(|item| Some((item, devices(item)?)))),
            None => workers.extend(devices(root).map(|devices| (root, devices))),
        }
    }
    let Some((first, _)) = workers.first() else {
        return Ok(None);
    };
    if workers.len() > WORKERS_LIMIT {
        return Err(text.too_many(first.line(), "workers", WORKERS_LIMIT as u64));
    }
    let mut import = Import::new(Kind::WorkerJson);
    let mut total = 0;
    for (worker, devices) in workers {
        if devices.len() > GPUS_LIMIT {
            return Err(text.too_many(worker.line(), "devices in one worker", GPUS_LIMIT as u64));
        }
        total += devices.len() as u64;
        let node = node(worker, devices, &mut import);
        import.facts.nodes.push(node);
    }
    import.gpus = Some(total);
    Ok(Some(import))
}

/// The devices of a worker: objects with a name or memory.
fn devices(worker: &Node) -> Option<&[Node]> {
    let holders = [
        Some(worker),
        worker.get("status"),
        worker.get("spec"),
        worker.get("worker"),
    ];
    let mut lists = holders
        .into_iter()
        .flatten()
        .flat_map(|holder| LISTS.iter().filter_map(|key| holder.get(key)?.list()));
    lists.find(|list| {
        let is_device = |node: &Node| node.get("memory").is_some() || node.get("vendor").is_some();
        list.iter().all(is_device) && (!list.is_empty() || worker.get("status").is_some())
    })
}

fn node(worker: &Node, devices: &[Node], import: &mut Import) -> NodeFacts {
    let name = ["name", "hostname"]
        .iter()
        .find_map(|key| worker.get(key)?.text());
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    let mut gpus: Vec<(Option<String>, u64, Option<Bytes>)> = Vec::new();
    for device in devices {
        let text = |key: &str| {
            device
                .get(key)
                .and_then(Node::text)
                .filter(|text| !text.is_empty())
        };
        let memory = device
            .get("memory")
            .and_then(|memory| memory.count().or_else(|| memory.get("total")?.count()));
        if text("name").is_none() {
            import.lost(device.line(), "the device has no name");
        }
        if memory.is_none() {
            import.lost(device.line(), "the device has no amount of memory");
        }
        // Devices of two vendors are both numbered from zero, so only the UUID tells one twice.
        let uuid = text("uuid").filter(|uuid| {
            uuid.starts_with("GPU-")
                && uuid
                    .bytes()
                    .any(|byte| byte != b'0' && byte != b'-' && byte.is_ascii_hexdigit())
        });
        if let Some(uuid) = uuid
            && let Some(first) = seen.insert(uuid, device.line())
        {
            import.problem(device.line(), format!("the device stands in line {first} too"));
        }
        gpus.push((text("name").map(str::to_owned), 1, memory.map(Bytes)));
    }
    NodeFacts {
        line: worker.line(),
        names: name.map(str::to_owned).into_iter().collect(),
        count: 1,
        gpus,
    }
}
