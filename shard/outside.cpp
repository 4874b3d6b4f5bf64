#include "shard/outside.h"

#include <algorithm>

#include "shard/alive.h"
#include "shard/root.h"

namespace sherd::shard {

void Outside::add_to(const std::shared_ptr<Record>& record, const Root& root) {
  remember(records_, record);
  std::erase_if(uses_, [](const Record::Use& use) {
    const auto gathered = use.gathered.lock();
    return !gathered || gathered->group().retired();
  });
  for (const Record::Use& use : uses_)
    if (use.moment != Record::Moment::kept || use.gathered.lock()->group().root().get() == &root)
      record->add(use);
}

void Outside::read(Gathered& gathered) {
  const auto before = alive<Record>(records_);
  for (const auto& record : before) record->read_later(gathered);
  const Record::Use use = Record::use_of(gathered, Record::Moment::outside);
  if (!use.planned) return;
  for (const auto& record : before) record->add_unless_used(use);
  keep(use);
}

void Outside::keep(const Record::Use& use) {
  const auto same = [&](const Record::Use& u) {
    return u.moment == use.moment && u.gathered.lock() == use.gathered.lock();
  };
  if (std::ranges::none_of(uses_, same)) uses_.push_back(use);
}

void Outside::backward_over(std::span<Record* const> records) {
  std::erase_if(uses_, [&](const Record::Use& use) {
    return std::ranges::any_of(records, [&](const Record* record) { return record->has(use); });
  });
}

void Outside::forget(const Root& root) {
  std::erase_if(uses_, [&](const Record::Use& use) {
    const auto gathered = use.gathered.lock();
    return !gathered || gathered->group().root().get() == &root;
  });
}

}  // namespace sherd::shard
